// What headers of LibTorch name of it.
#pragma once

using cusolverDnHandle_t = struct cusolverDnContext*;
