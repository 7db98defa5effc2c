// What headers of LibTorch name of it.
#pragma once

using cublasStatus_t = int;
