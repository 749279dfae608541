// The check whether the kernels run here. Only this file must run on any CPU; the others may use AVX-512 anywhere.
#include "abi.h"

#if defined(__x86_64__)
#define PDSERVE_ANY_CPU __attribute__((target("no-avx")))
#else
#error "the kernels are for x86-64"
#endif

extern "C" {

PDSERVE_ANY_CPU int pdserve_abi(void) { return PDSERVE_ABI; }

PDSERVE_ANY_CPU const char* pdserve_missing(void) {
    if (!__builtin_cpu_supports("avx512f")) return "avx512f";
    if (!__builtin_cpu_supports("avx512bw")) return "avx512bw";
    if (!__builtin_cpu_supports("avx512vl")) return "avx512vl";
    if (!__builtin_cpu_supports("avx512dq")) return "avx512dq";
    if (!__builtin_cpu_supports("avx512vnni")) return "avx512_vnni";
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512_bf16";
    return "";
}

PDSERVE_ANY_CPU const char* pdserve_compiler(void) {
#ifdef __clang__
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}
}
