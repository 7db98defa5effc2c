// What headers of LibTorch name of it.
#pragma once

using cusparseHandle_t = struct cusparseContext*;
