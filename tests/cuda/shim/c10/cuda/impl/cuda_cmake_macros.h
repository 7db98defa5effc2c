// A build of LibTorch for CUDA generates this.
#pragma once

#define C10_CUDA_BUILD_SHARED_LIBS
