/* A compute plug-in that breaks the contract in a way chosen when it is compiled or opened. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "thermocline_plugin.h"

#ifndef NAME
#define NAME "liar"
#endif
#ifndef MAJOR
#define MAJOR THERMOCLINE_ABI_MAJOR
#endif
#ifndef MINOR
#define MINOR THERMOCLINE_ABI_MINOR
#endif
#ifndef WORD
#define WORD THERMOCLINE_MAGIC
#endif
#ifndef KIND
#define KIND ThermoclineKind_COMPUTE
#endif

#ifdef CONSTRUCTOR
__attribute__((constructor)) static void constructor(void) {
    fprintf(stdout, "noise without an end of line");
    fflush(stdout);
    fprintf(stderr, "about to misbehave\n");
    CONSTRUCTOR;
}
#endif

static void say(ThermoclineSink sink, const char *text) {
    ThermoclineBytes bytes = {(const uint8_t *)text, strlen(text)};
    if (sink.write) sink.write(sink.context, bytes);
}

static ThermoclineStatus info(ThermoclineSink out, ThermoclineSink detail) {
    (void)detail;
#ifdef INFO
    say(out, INFO);
#else
    say(out, "{\"name\": \"" NAME "\"}");
#endif
    return ThermoclineStatus_OK;
}

static ThermoclineStatus schema(ThermoclineSink out, ThermoclineSink detail) {
    (void)detail;
    say(out, "{\"fields\": [{\"name\": \"lie\", \"kind\": {\"type\": \"integer\", \"min\": 0, \"max\": 99},"
             " \"default\": 0, \"doc\": \"Which lie.\"}]}");
    return ThermoclineStatus_OK;
}

#define DEVICE "{\"name\": \"liar\", \"tolerance\": \"f32\"}"

static ThermoclineStatus devices(ThermoclineBytes options, ThermoclineSink out, ThermoclineSink detail) {
    (void)options, (void)detail;
#ifdef DEVICES
    DEVICES;
#endif
    say(out, "[" DEVICE "]");
    return ThermoclineStatus_OK;
}

static ThermoclineStatus why_none(ThermoclineSink out, ThermoclineSink detail) {
    (void)detail;
    say(out, "no reason");
    return ThermoclineStatus_OK;
}

struct ThermoclineInstance {
    int lie;
};

#ifdef NEEDS
extern int NEEDS(void); /* of another library, called by the last function of all */
#endif

static ThermoclineStatus open_device(uint32_t index, ThermoclineBytes options, ThermoclineInstance **out,
                                     ThermoclineSink detail) {
    char text[64] = {0};
    int lie = 0;
    (void)index, (void)detail;
    memcpy(text, options.data, options.len < 63 ? options.len : 63);
    sscanf(text, "lie = %d", &lie);
    *out = calloc(1, sizeof **out);
    if (!*out) return ThermoclineStatus_OUT_OF_MEMORY;
    (*out)->lie = lie;
    if (lie == 1) {
        free(*out);
        *out = NULL;
    }
    return ThermoclineStatus_OK;
}

static void close_device(ThermoclineInstance *device) {
    free(device);
#ifdef NEEDS
    (void)NEEDS();
#endif
}

static ThermoclineStatus describe(ThermoclineInstance *device, ThermoclineSink out, ThermoclineSink detail) {
    (void)detail;
    ThermoclineBytes null = {NULL, 8}, endless = {(const uint8_t *)"x", SIZE_MAX};
    switch (device->lie) {
    case 2: say(out, "not json"); break;
    case 3: say(out, "{\"name\": \"\xff\xfe\"}"); break;
    case 4: say(out, "{\"name\": \"x\", \"tolerance\": \"f7\"}"); break;
    case 5: say(out, "{\"name\": \"x\", \"tolerance\": \"f32\", \"alignment\": 3}"); break;
    case 6: out.write(out.context, null); break;
    case 7: out.write(out.context, endless); break;
    case 8: break;
    default: say(out, DEVICE);
    }
    return ThermoclineStatus_OK;
}

static ThermoclineStatus supports(ThermoclineInstance *device, const ThermoclineOperationList *list,
                                  uint32_t index, ThermoclineSupport *out, ThermoclineSink reason,
                                  ThermoclineSink detail) {
    (void)list, (void)index, (void)detail;
    *out = device->lie == 10 ? 77 : ThermoclineSupport_NO;
    if (device->lie != 11) say(reason, "it lies");
    return device->lie == 12 ? 99 : ThermoclineStatus_OK;
}

static ThermoclineStatus allocate(ThermoclineInstance *device, uint64_t bytes, ThermoclineBufferUse purpose,
                                  uint64_t *out, ThermoclineSink detail) {
    (void)purpose;
    *out = bytes;
    if (device->lie == 20) {
        say(detail, "\xff broken sentence");
        return 12345;
    }
    if (device->lie == 21) {
        say(detail, "not a number");
        return ThermoclineStatus_UNKNOWN_BUFFER;
    }
    return ThermoclineStatus_OK;
}

static ThermoclineStatus import(ThermoclineInstance *device, const ThermoclineHostSpan *span, uint64_t *out,
                                ThermoclineSink detail) {
    (void)device, (void)span, (void)out;
    say(detail, "it imports nothing");
    return ThermoclineStatus_UNSUPPORTED;
}

static ThermoclineStatus free_buffer(ThermoclineInstance *device, uint64_t buffer, ThermoclineSink detail) {
    (void)device, (void)buffer, (void)detail;
    return ThermoclineStatus_OK;
}

static ThermoclineStatus prepare(ThermoclineInstance *device, const ThermoclineOperationList *list,
                                 uint64_t *out, ThermoclineSink detail) {
    (void)device, (void)list, (void)detail;
    *out = 1;
    return ThermoclineStatus_OK;
}

#ifndef NO_SUBMIT
static ThermoclineStatus submit(ThermoclineInstance *device, uint64_t executable,
                                const ThermoclineBindings *bindings, const uint64_t *waits, size_t waits_len,
                                uint64_t *out, ThermoclineSink detail) {
    (void)device, (void)executable, (void)bindings, (void)waits, (void)waits_len, (void)detail;
    *out = 1;
    return ThermoclineStatus_OK;
}
#endif

static ThermoclineStatus wait_value(ThermoclineInstance *device, uint64_t value, uint64_t timeout_ns,
                                    ThermoclineReached *out, ThermoclineSink detail) {
    (void)value, (void)timeout_ns, (void)detail;
    *out = device->lie == 30 ? 9 : ThermoclineReached_DONE;
    return ThermoclineStatus_OK;
}

static ThermoclineStatus counters(ThermoclineInstance *device, ThermoclineSink out, ThermoclineSink detail) {
    (void)detail;
    say(out, device->lie == 40 ? "{\"submissions\": -1}" : "{\"submissions\": 1}");
    return ThermoclineStatus_OK;
}

static const struct {
    ThermoclineComputeTable table;
    void (*of_a_later_version)(void);
} plugin = {
    .table = {.head = {.magic = WORD,
#ifdef SIZE
                       .struct_size = SIZE,
#else
                       .struct_size = sizeof plugin,
#endif
                       .kind = KIND,
                       .abi_major = MAJOR,
                       .abi_minor = MINOR,
#ifdef RESERVED
                       .reserved = {RESERVED},
#endif
                      },
              .info = info,
              .schema = schema,
              .devices = devices,
              .why_none = why_none,
              .open = open_device,
              .close = close_device,
              .describe = describe,
              .supports = supports,
              .allocate = allocate,
              .import = import,
              .free = free_buffer,
              .prepare = prepare,
              .release = free_buffer,
#ifndef NO_SUBMIT
              .submit = submit,
#endif
              .wait = wait_value,
              .counters = counters},
};

#ifndef NO_SYMBOL
const ThermoclineHead *thermocline_plugin(void) {
#ifdef NULL_TABLE
    return NULL;
#else
    return &plugin.table.head;
#endif
}
#endif
