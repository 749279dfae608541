// The kernels for CPUs with AVX-512 with its dot products of 8-bit integers, which have none of bfloat16 (Cascade Lake, Ice Lake).
//
// pyproject.toml compiles this file, and with it all others, for these CPUs alone; see lanes.h for what differs.
#include "compute.cpp"
#include "cpu.cpp"
#include "kernels.cpp"
#include "plan.cpp"
