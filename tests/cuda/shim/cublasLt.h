// What headers of LibTorch name of it.
#pragma once

using cublasLtHandle_t = struct cublasLtContext*;
