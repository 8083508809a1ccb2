/* A stand-in for the CUDA driver, over memory files: its virtual memory calls, strictly.
 *
 * It knows what the real driver refuses, and refuses more where the real one's behaviour is
 * undefined.  It counts what lives, counts calls, and fails the one that it is told to.  It
 * says nothing about time, kernels, coherence of aliases, or the sizes of a real device.
 *
 * The declarations are our own: numbers and layouts are those of the driver's interface.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int R;
typedef uint64_t Ptr;
enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600 };
enum { NUM_DEVICES = 2, MOST = 512, ANY_BYTE = 0xA5, POSIX_FD = 1 };

struct location { int type, id; };
struct prop {
    int type, handle_types;
    struct location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char more[4]; } flags;
};
struct grant { struct location location; int flags; };

struct memory { int is_held, num_maps, fd, is_exportable; size_t size; };
struct mapping { Ptr va; size_t size; int memory, access[NUM_DEVICES]; };
struct range { Ptr va; size_t size; };

/* Handles are indices that only grow, so that one used too long is known for what it is. */
static struct memory memories[1 << 20];
static int num_memories = 1;
static struct mapping mappings[MOST];
static struct range ranges[MOST];
static int events[1 << 20], num_events = 1, streams[MOST], num_streams = 3;
static int retained[NUM_DEVICES];
static __thread int contexts[8], depth; /* device + 1, a stack */
static size_t granule, total;
static int owner_pid, holds;
static struct { char name[48]; int left, code; } fault;
static struct { char name[48]; long calls; } counts[128];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void unlock(int *unused) { (void)unused; pthread_mutex_unlock(&lock); }

/* Count the call; its code if this is the one that is to fail. */
static R enter(const char *name) {
    int i = 0;
    while (counts[i].name[0] && strcmp(counts[i].name, name)) i++;
    strcpy(counts[i].name, name);
    counts[i].calls++;
    if (!strcmp(fault.name, name) && --fault.left == 0) {
        fault.name[0] = 0;
        return fault.code;
    }
    return owner_pid == getpid() ? OK : NOT_INITIALIZED;
}
#define ENTER                                               \
    __attribute__((cleanup(unlock))) int locked = 0;        \
    pthread_mutex_lock(&lock);                              \
    R code = enter(__func__);                               \
    (void)locked;                                           \
    if (code) return code
#define NEED(condition, error) if (!(condition)) return (error)
#define NEED_CONTEXT NEED(depth && contexts[depth - 1] && retained[contexts[depth - 1] - 1], INVALID_CONTEXT)

static int is_device(int d) { return d >= 0 && d < NUM_DEVICES; }
static int is_aligned(uint64_t n) { return n && n % granule == 0; }
static struct memory *held(uint64_t h) {
    return h > 0 && h < (uint64_t)num_memories && memories[h].is_held ? &memories[h] : NULL;
}
static void drop(struct memory *m) {
    if (!m->is_held && !m->num_maps) { close(m->fd); m->size = 0; }
}
static size_t used(void) {
    size_t sum = 0;
    for (int i = 1; i < num_memories; i++) sum += memories[i].is_exportable >= 0 ? memories[i].size : 0;
    return sum;
}
/* Bytes of [va, va + n) that are mapped; 1 in *whole if they are exactly whole mappings. */
static size_t mapped(Ptr va, size_t n, int *whole) {
    size_t sum = 0;
    *whole = 1;
    for (int i = 0; i < MOST; i++) {
        Ptr a = mappings[i].va, b = a + mappings[i].size;
        if (!a || b <= va || a >= va + n) continue;
        if (a < va || b > va + n) *whole = 0;
        sum += (b < va + n ? b : va + n) - (a > va ? a : va);
    }
    *whole = *whole && sum == n;
    return sum;
}
static int may(Ptr va, size_t n, int device, int access) {
    int whole;
    if (mapped(va, n, &whole) != n) return 0;
    for (int i = 0; i < MOST; i++) {
        Ptr a = mappings[i].va, b = a + mappings[i].size;
        if (a && b > va && a < va + n && (mappings[i].access[device] & access) != access) return 0;
    }
    return 1;
}

R cuInit(unsigned flags) {
    (void)flags;
    if (!granule) granule = 2 << 20;
    if (!total) total = (size_t)1 << 30;
    if (!owner_pid) owner_pid = getpid();
    ENTER; return OK;
}
R cuDeviceGetCount(int *count) { ENTER; *count = NUM_DEVICES; return OK; }
R cuDeviceGet(int *device, int number) {
    ENTER; NEED(is_device(number), INVALID_DEVICE);
    *device = number; return OK;
}
R cuDeviceGetName(char *name, int size, int device) {
    ENTER; NEED(is_device(device), INVALID_DEVICE);
    snprintf(name, size, "FAKE (memfd) no GPU"); return OK;
}
R cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER; NEED(is_device(device), INVALID_DEVICE);
    retained[device]++;
    *context = (void *)(intptr_t)(device + 1); return OK;
}
R cuDevicePrimaryCtxRelease(int device) {
    ENTER; NEED(is_device(device) && retained[device], INVALID_CONTEXT);
    retained[device]--; return OK;
}
R cuCtxGetCurrent(void **context) {
    ENTER;
    *context = (void *)(intptr_t)(depth ? contexts[depth - 1] : 0); return OK;
}
R cuCtxSetCurrent(void *context) {
    ENTER;
    NEED(is_device((int)(intptr_t)context - 1) && retained[(intptr_t)context - 1], INVALID_CONTEXT);
    if (!depth) depth = 1;
    contexts[depth - 1] = (int)(intptr_t)context; return OK;
}
R cuCtxPushCurrent(void *context) {
    ENTER;
    NEED(is_device((int)(intptr_t)context - 1) && retained[(intptr_t)context - 1], INVALID_CONTEXT);
    NEED(depth < 8, INVALID_VALUE);
    contexts[depth++] = (int)(intptr_t)context; return OK;
}
R cuCtxPopCurrent(void **context) {
    ENTER; NEED(depth, INVALID_CONTEXT);
    *context = (void *)(intptr_t)contexts[--depth]; return OK;
}
R cuCtxSynchronize(void) { ENTER; NEED_CONTEXT; holds = 0; return OK; }

R cuMemGetAllocationGranularity(size_t *found, const struct prop *prop, int option) {
    ENTER;
    NEED(prop->type == 1 && prop->location.type == 1 && is_device(prop->location.id), INVALID_VALUE);
    NEED(option == 0 || option == 1, INVALID_VALUE);
    *found = granule; return OK;
}
R cuMemAddressReserve(Ptr *va, size_t size, size_t align, Ptr hint, uint64_t flags) {
    ENTER; NEED(is_aligned(size) && !hint && !flags && !(align & (align - 1)), INVALID_VALUE);
    if (align < granule) align = granule;
    int i = 0;
    while (i < MOST && ranges[i].va) i++;
    NEED(i < MOST, NO_MEMORY);
    char *found = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(found != MAP_FAILED, NO_MEMORY);
    Ptr start = ((Ptr)found + align - 1) / align * align, stop = (Ptr)found + size + align;
    if (start > (Ptr)found) munmap(found, start - (Ptr)found);
    if (stop > start + size) munmap((void *)(start + size), stop - start - size);
    ranges[i] = (struct range){start, size};
    *va = start; return OK;
}
R cuMemAddressFree(Ptr va, size_t size) {
    ENTER;
    int whole;
    for (int i = 0; i < MOST; i++)
        if (va && ranges[i].va == va) {
            NEED(ranges[i].size == size && !mapped(va, size, &whole), INVALID_VALUE);
            munmap((void *)va, size);
            ranges[i].va = 0;
            return OK;
        }
    return INVALID_VALUE;
}
static R add_memory(uint64_t *handle, int fd, size_t size, int is_exportable) {
    memories[num_memories] = (struct memory){1, 0, fd, is_exportable, size};
    *handle = num_memories++; return OK;
}
R cuMemCreate(uint64_t *handle, size_t size, const struct prop *prop, uint64_t flags) {
    ENTER;
    NEED(is_aligned(size) && !flags && prop->type == 1 && is_device(prop->location.id), INVALID_VALUE);
    NEED(prop->location.type == 1 && (prop->handle_types | POSIX_FD) == POSIX_FD, INVALID_VALUE);
    NEED(used() + size <= total && num_memories < 1 << 20, NO_MEMORY);
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    NEED(fd >= 0 && !ftruncate(fd, size), NO_MEMORY);
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    /* Nothing promises zeros. */
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(p != MAP_FAILED, NO_MEMORY);
    memset(p, ANY_BYTE, size);
    munmap(p, size);
    return add_memory(handle, fd, size, prop->handle_types);
}
R cuMemRelease(uint64_t handle) {
    ENTER;
    struct memory *m = held(handle);
    NEED(m, INVALID_HANDLE);
    m->is_held = 0;
    drop(m); return OK;
}
R cuMemMap(Ptr va, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER;
    struct memory *m = held(handle);
    int whole, inside = 0, i = 0;
    NEED(m, INVALID_HANDLE);
    NEED(is_aligned(va) && !offset && !flags && size == m->size, INVALID_VALUE);
    for (int j = 0; j < MOST; j++)
        inside |= ranges[j].va && va >= ranges[j].va && va + size <= ranges[j].va + ranges[j].size;
    NEED(inside && !mapped(va, size, &whole), INVALID_VALUE);
    while (i < MOST && mappings[i].va) i++;
    NEED(i < MOST, NO_MEMORY);
    void *p = mmap((void *)va, size, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0);
    NEED(p != MAP_FAILED, NO_MEMORY);
    mappings[i] = (struct mapping){.va = va, .size = size, .memory = (int)handle};
    m->num_maps++; return OK;
}
/* One whole mapping, which is less than the driver takes, and all that its likes take. */
R cuMemUnmap(Ptr va, size_t size) {
    ENTER;
    for (int i = 0; i < MOST; i++)
        if (va && mappings[i].va == va && mappings[i].size == size) {
            mmap((void *)va, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            struct memory *m = &memories[mappings[i].memory];
            mappings[i].va = 0;
            m->num_maps--;
            drop(m);
            return OK;
        }
    return INVALID_VALUE;
}
R cuMemSetAccess(Ptr va, size_t size, const struct grant *grants, size_t count) {
    ENTER;
    int whole;
    mapped(va, size, &whole);
    NEED(whole && count, INVALID_VALUE);
    for (size_t k = 0; k < count; k++) {
        int flags = grants[k].flags;
        NEED(grants[k].location.type == 1 && (flags == 0 || flags == 1 || flags == 3), INVALID_VALUE);
        NEED(is_device(grants[k].location.id), INVALID_DEVICE);
    }
    for (int i = 0; i < MOST; i++) {
        struct mapping *m = &mappings[i];
        if (!m->va || m->va < va || m->va >= va + size) continue;
        for (size_t k = 0; k < count; k++) m->access[grants[k].location.id] = grants[k].flags;
        int any = 0;
        for (int d = 0; d < NUM_DEVICES; d++) any |= m->access[d];
        mprotect((void *)m->va, m->size, any); /* the bits happen to be the same */
    }
    return OK;
}
R cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, uint64_t flags) {
    ENTER;
    struct memory *m = held(handle);
    NEED(m, INVALID_HANDLE);
    NEED(type == POSIX_FD && m->is_exportable == POSIX_FD && !flags, INVALID_VALUE);
    *(int *)shared = dup(m->fd); return OK;
}
R cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type) {
    ENTER;
    char path[64], name[64] = {0};
    struct stat st;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)shared);
    NEED(type == POSIX_FD && readlink(path, name, sizeof name - 1) > 0, INVALID_VALUE);
    NEED(strstr(name, "memfd:fake-cuda") && !fstat((int)(intptr_t)shared, &st), INVALID_VALUE);
    return add_memory(handle, fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0), st.st_size, -1);
}
R cuMemcpyHtoD(Ptr to, const void *from, size_t size) {
    ENTER; NEED_CONTEXT; NEED(may(to, size, contexts[depth - 1] - 1, 3), INVALID_VALUE);
    memcpy((void *)to, from, size); return OK;
}
R cuMemcpyDtoH(void *to, Ptr from, size_t size) {
    ENTER; NEED_CONTEXT; NEED(may(from, size, contexts[depth - 1] - 1, 1), INVALID_VALUE);
    memcpy(to, (void *)from, size); return OK;
}
static int is_stream(intptr_t s) { return s >= 0 && s < num_streams && (s < 3 || streams[s]); }
R cuMemsetD8Async(Ptr va, unsigned char value, size_t size, void *stream) {
    ENTER; NEED_CONTEXT; NEED(is_stream((intptr_t)stream), INVALID_HANDLE);
    NEED(may(va, size, contexts[depth - 1] - 1, 3), INVALID_VALUE);
    memset((void *)va, value, size); return OK;
}
R cuStreamCreate(void **stream, unsigned flags) {
    ENTER; NEED_CONTEXT; NEED(flags <= 1 && num_streams < MOST, INVALID_VALUE);
    streams[num_streams] = 1;
    *stream = (void *)(intptr_t)num_streams++; return OK;
}
R cuStreamSynchronize(void *stream) {
    ENTER; NEED_CONTEXT; NEED(is_stream((intptr_t)stream), INVALID_HANDLE); return OK;
}
R cuStreamDestroy(void *stream) {
    ENTER; NEED((intptr_t)stream >= 3 && is_stream((intptr_t)stream), INVALID_HANDLE);
    streams[(intptr_t)stream] = 0; return OK;
}
R cuEventCreate(void **event, unsigned flags) {
    ENTER;
    (void)flags;
    NEED_CONTEXT;
    NEED(num_events < 1 << 20, NO_MEMORY);
    events[num_events] = 1;
    *event = (void *)(intptr_t)num_events++; return OK;
}
static int is_event(intptr_t e) { return e > 0 && e < num_events && events[e]; }
R cuEventRecord(void *event, void *stream) {
    ENTER; NEED_CONTEXT;
    NEED(is_event((intptr_t)event) && is_stream((intptr_t)stream), INVALID_HANDLE); return OK;
}
R cuEventQuery(void *event) {
    ENTER; NEED(is_event((intptr_t)event), INVALID_HANDLE);
    if (holds > 0) { holds--; return NOT_READY; }
    return OK;
}
R cuEventDestroy(void *event) {
    ENTER; NEED(is_event((intptr_t)event), INVALID_HANDLE);
    events[(intptr_t)event] = 0; return OK;
}

/* What tests ask of it. */
void fake_fail(const char *name, int call, int code) {
    snprintf(fault.name, sizeof fault.name, "%s", name);
    fault.left = call;
    fault.code = code;
}
int fake_has_fault(void) { return fault.name[0] != 0; }
void fake_hold_events(int queries) { holds = queries; }
void fake_size(size_t granule_bytes, size_t total_bytes) { granule = granule_bytes; total = total_bytes; }
long fake_calls(const char *name) {
    for (int i = 0; counts[i].name[0]; i++)
        if (!strcmp(counts[i].name, name)) return counts[i].calls;
    return 0;
}
long fake_live(const char *what) {
    long n = 0;
    if (!strcmp(what, "handles")) for (int i = 1; i < num_memories; i++) n += memories[i].is_held;
    if (!strcmp(what, "bytes")) n = (long)used();
    if (!strcmp(what, "maps")) for (int i = 0; i < MOST; i++) n += mappings[i].va != 0;
    if (!strcmp(what, "reservations")) for (int i = 0; i < MOST; i++) n += ranges[i].va != 0;
    if (!strcmp(what, "contexts")) for (int i = 0; i < NUM_DEVICES; i++) n += retained[i];
    if (!strcmp(what, "events")) for (int i = 1; i < num_events; i++) n += events[i];
    if (!strcmp(what, "streams")) for (int i = 3; i < num_streams; i++) n += streams[i];
    return n;
}

#define FUNCTION(name) {#name, (void *)name}
R cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } table[] = {
        FUNCTION(cuInit), FUNCTION(cuDeviceGetCount),
        FUNCTION(cuDeviceGet), FUNCTION(cuDeviceGetName), FUNCTION(cuDevicePrimaryCtxRetain),
        FUNCTION(cuDevicePrimaryCtxRelease), FUNCTION(cuCtxGetCurrent), FUNCTION(cuCtxSetCurrent),
        FUNCTION(cuCtxPushCurrent), FUNCTION(cuCtxPopCurrent), FUNCTION(cuCtxSynchronize),
        FUNCTION(cuMemGetAllocationGranularity), FUNCTION(cuMemAddressReserve),
        FUNCTION(cuMemAddressFree), FUNCTION(cuMemCreate), FUNCTION(cuMemRelease),
        FUNCTION(cuMemMap), FUNCTION(cuMemUnmap), FUNCTION(cuMemSetAccess),
        FUNCTION(cuMemExportToShareableHandle), FUNCTION(cuMemImportFromShareableHandle),
        FUNCTION(cuMemcpyHtoD), FUNCTION(cuMemcpyDtoH),
        FUNCTION(cuMemsetD8Async), FUNCTION(cuStreamCreate), FUNCTION(cuStreamSynchronize),
        FUNCTION(cuStreamDestroy), FUNCTION(cuEventCreate), FUNCTION(cuEventRecord),
        FUNCTION(cuEventQuery), FUNCTION(cuEventDestroy), FUNCTION(cuGetProcAddress_v2),
    };
    (void)version;
    (void)flags;
    *found = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name)) *found = table[i].function;
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
