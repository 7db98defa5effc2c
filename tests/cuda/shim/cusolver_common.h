// What headers of LibTorch name of it.
#pragma once

using cusolverStatus_t = int;
