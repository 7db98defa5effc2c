// What headers of LibTorch name of it.
#pragma once

#include <cublas_api.h>
#include <cuda_fp16.h>

using cublasHandle_t = struct cublasContext*;
