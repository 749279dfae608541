// The kernels for CPUs with AVX2 and FMA.
//
// pyproject.toml compiles this file, and with it all others, for these CPUs alone; see lanes.h for what differs.
#include "compute.cpp"
#include "cpu.cpp"
#include "kernels.cpp"
#include "plan.cpp"
