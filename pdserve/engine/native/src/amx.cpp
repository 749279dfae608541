// The kernels for CPUs with AMX: products of bfloat16 and of 8-bit integers by tiles (tile_products.h), all else as for AVX-512.
//
// pyproject.toml compiles this file, and with it all others, for these CPUs alone; see lanes.h for what differs.
#define PDSERVE_AMX
#include "compute.cpp"
#include "cpu.cpp"
#include "kernels.cpp"
#include "plan.cpp"
