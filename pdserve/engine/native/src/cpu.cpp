// The check whether the kernels run here. These functions must run on any CPU; the others may use the set anywhere.
#include "abi.h"

#ifdef PDSERVE_AMX
#include <cpuid.h>

#include "tiles.h"
#endif

#if defined(__x86_64__)
#define PDSERVE_ANY_CPU __attribute__((target("no-avx")))
#else
#error "the kernels are for x86-64"
#endif

#ifdef PDSERVE_AMX
namespace {

// The kernel is asked last: it gives tiles only to who asks.
PDSERVE_ANY_CPU const char* missing_of_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) d = 0;
    if (!(d >> 24 & 1)) return "amx_tile";
    if (!(d >> 22 & 1)) return "amx_bf16";
    if (!(d >> 25 & 1)) return "amx_int8";
    return pdserve::tiles_are_permitted() ? "" : "the kernel gives no permission to use tiles";
}

}  // namespace
#endif

extern "C" {

PDSERVE_ANY_CPU int pdserve_abi(void) { return PDSERVE_ABI; }

// Returns the name of the set that this library is for, which PDSERVE_ISA takes.
PDSERVE_ANY_CPU const char* pdserve_isa(void) {
#if defined(PDSERVE_AMX)
    return pdserve::tiles_are_emulated ? "amx_emulated" : "amx";
#elif defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#else
    return "avx2";
#endif
}

PDSERVE_ANY_CPU const char* pdserve_missing(void) {
    if (!__builtin_cpu_supports("avx2")) return "avx2";
    if (!__builtin_cpu_supports("fma")) return "fma";
#ifdef __AVX512F__
    if (!__builtin_cpu_supports("avx512f")) return "avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "avx512dq";
    if (!__builtin_cpu_supports("avx512vnni")) return "avx512_vnni";
#endif
#ifdef __AVX512BF16__
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
#endif
#ifdef PDSERVE_AMX
    if (!pdserve::tiles_are_emulated) return missing_of_tiles();
#endif
    return "";
}

PDSERVE_ANY_CPU int pdserve_emulate(void) {
#ifdef PDSERVE_AMX
    pdserve::tiles_are_emulated = true;
    return 1;
#else
    return 0;
#endif
}

PDSERVE_ANY_CPU const char* pdserve_compiler(void) {
#ifdef __clang__
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}
}
