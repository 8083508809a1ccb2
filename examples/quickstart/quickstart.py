"""Store a prompt's cache on one worker, ask where it lives, and restore it on another."""

import ray

from codec.entropy_calibration import EntropyConfig
from fabric import Fabric, FabricConfig
from fabric.calibrate import calibrate, default_prompt
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
loaded = load_model()  # the packaged SmolLM2; or a directory, or a GGUF file
engine = TransformersEngine(loaded)

# --8<-- the ten lines of the README
tokens = loaded.tokenizer(default_prompt().read_text())["input_ids"][:1000]
fabric = Fabric.start(FabricConfig(), nodes=["a", "b"])
codecs = calibrate(engine, loaded, config=EntropyConfig(target=16.0))
fabric.add_model(engine, codecs, name="smollm2", allow_unqualified=True)  # or evaluate first

cache, _ = engine.prefill(tokens)
fabric.store(engine, cache, tokens, at="a")

where = fabric.client.residency(tokens)  # answered in this process, no actor call
plan = fabric.client.plan(tokens, at="b")  # predicted seconds, the choice and its reason
outcome = fabric.restore(engine, tokens, at="b")  # moves and decodes, or says why not
text = engine.generate(tokens, outcome.cache, max_new_tokens=32)
# --8<--

print(f"{where.prefix_tokens} tokens live on a in {where.stored_bytes} bytes")
print(plan.sentence)
print(f"restored {outcome.tokens_restored} tokens: {outcome.reason}")
print(loaded.tokenizer.decode(text))

assert where.prefix_tokens == 768
assert outcome.tokens_restored == 768 - 128 or outcome.reason == "slower_than_recompute"
fabric.stop()
ray.shutdown()
