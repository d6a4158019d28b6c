#pragma once

__device__ __forceinline__ float scaled(float x) { return x * SCALE + OFFSET; }
