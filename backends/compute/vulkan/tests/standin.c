// A Vulkan library for tests that misbehaves. What it does is chosen by the environment variable STANDIN when it is first
// called: `crash`, `hang`, `lost:N` (the real library, but submission N loses the device) or `stuck:N` (submission N is
// accepted and never done).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*function)(void);
typedef function (*lookup)(void *, const char *);
typedef int32_t (*submit)(void *, uint32_t, const void *, uint64_t);

static lookup instance_lookup, device_lookup;
static submit real_submit;
static long submissions;

static const char *choice(void) {
    const char *text = getenv("STANDIN");
    return text ? text : "";
}

static int32_t our_submit(void *queue, uint32_t count, const void *infos, uint64_t fence) {
    long at = strtol(choice() + strcspn(choice(), ":") + (strchr(choice(), ':') != 0), 0, 10);
    submissions += 1;
    if (submissions >= at) {
        return strncmp(choice(), "lost", 4) == 0 ? -4 : 0;
    }
    return real_submit(queue, count, infos, fence);
}

static function our_device_lookup(void *device, const char *name) {
    function found = device_lookup(device, name);
    if (found && strcmp(name, "vkQueueSubmit") == 0) {
        real_submit = (submit)found;
        return (function)our_submit;
    }
    return found;
}

function vkGetInstanceProcAddr(void *instance, const char *name) {
    if (strcmp(choice(), "crash") == 0) {
        abort();
    }
    while (strcmp(choice(), "hang") == 0) {
        sleep(3600);
    }
    if (!instance_lookup) {
        void *library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
        instance_lookup = library ? (lookup)dlsym(library, "vkGetInstanceProcAddr") : 0;
        if (!instance_lookup) {
            return 0;
        }
    }
    function found = instance_lookup(instance, name);
    if (found && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        device_lookup = (lookup)found;
        return (function)our_device_lookup;
    }
    return found;
}
