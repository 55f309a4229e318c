// A QNN library for tests that misbehaves. What it does is chosen by the environment variable STANDIN: `crash`, `hang`,
// `nothing` (no interface), `other` (another major version); or, with the real library of the variable REAL behind it,
// `compile` (compiling never ends), `stuck:N` and `fails:N` (run N of a graph never ends, or fails), `old` (the library
// refuses context binaries), `closed` (no device can be opened), `noisy` (it prints to the standard output whenever it
// can).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t (*providers)(const void ***, uint32_t *);
typedef uint64_t (*execute)(void *, const void *, uint32_t, void *, uint32_t, void *, void *);
typedef uint64_t (*create)(void *, const void *, void *);

// Byte offsets within an interface: the API's major version, and the slots of the table of functions.
enum { MAJOR = 16, TABLE = 40, FINALIZE = TABLE + 8 * 19, EXECUTE = TABLE + 8 * 21, LOAD = TABLE + 8 * 13,
       CREATE = TABLE + 8 * 1, DEVICE = TABLE + 8 * 40, BYTES = TABLE + 8 * 80 };

static unsigned char interface[BYTES];
static const void *listed[1] = {interface};
static execute real_execute;
static create real_create;
static long runs;

static const char *choice(void) {
    const char *text = getenv("STANDIN");
    return text ? text : "";
}

static int chosen(const char *word) {
    return strncmp(choice(), word, strlen(word)) == 0;
}

static void for_ever(void) {
    for (;;) {
        sleep(3600);
    }
}

static uint64_t our_execute(void *graph, const void *in, uint32_t ins, void *out, uint32_t outs, void *a, void *b) {
    const char *colon = strchr(choice(), ':');
    runs += 1;
    if (colon && runs == strtol(colon + 1, 0, 10)) {
        if (chosen("stuck")) {
            for_ever();
        }
        return 6001;
    }
    return real_execute(graph, in, ins, out, outs, a, b);
}

static uint64_t our_finalize(void *graph, void *profile, void *signal) {
    (void)graph, (void)profile, (void)signal;
    for_ever();
    return 0;
}

static uint64_t our_load(void) {
    return 5004;
}

static uint64_t our_device(void) {
    return 14001;
}

static uint64_t our_create(void *log, const void *configs, void *handle) {
    printf("the library talks while it opens\n");
    return real_create(log, configs, handle);
}

static void replace(size_t slot, void *ours, void *theirs) {
    if (theirs) {
        memcpy(theirs, interface + slot, sizeof(void *));
    }
    memcpy(interface + slot, &ours, sizeof(void *));
}

uint64_t QnnInterface_getProviders(const void ***out, uint32_t *count) {
    if (chosen("crash")) {
        abort();
    }
    if (chosen("hang")) {
        for_ever();
    }
    *out = listed;
    *count = chosen("nothing") ? 0 : 1;
    if (chosen("nothing")) {
        return 0;
    }
    if (chosen("other")) {
        uint32_t backend = 6, major = 3;
        memcpy(interface, &backend, 4);
        memcpy(interface + MAJOR, &major, 4);
        return 0;
    }
    void *library = dlopen(getenv("REAL"), RTLD_NOW | RTLD_LOCAL);
    providers real = library ? (providers)dlsym(library, "QnnInterface_getProviders") : 0;
    const void **theirs = 0;
    if (!real || real(&theirs, count) != 0 || *count == 0) {
        return 1;
    }
    *count = 1;
    memcpy(interface, theirs[0], TABLE + 8 * 71);
    if (chosen("stuck") || chosen("fails")) {
        replace(EXECUTE, (void *)our_execute, &real_execute);
    }
    if (chosen("compile")) {
        replace(FINALIZE, (void *)our_finalize, 0);
    }
    if (chosen("old")) {
        replace(LOAD, (void *)our_load, 0);
    }
    if (chosen("closed")) {
        replace(DEVICE, (void *)our_device, 0);
    }
    if (chosen("noisy")) {
        printf("the library talks while it is asked\n");
        replace(CREATE, (void *)our_create, &real_create);
    }
    return 0;
}
