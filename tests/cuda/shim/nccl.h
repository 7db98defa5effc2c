// What headers of LibTorch name of NCCL. Only to compile; nothing links this.
#pragma once

#include <cstddef>
#include <cstdint>

#define NCCL_MAJOR 2
#define NCCL_MINOR 23
#define NCCL_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 23, 0)
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR (-1)
#define NCCL_CONFIG_INITIALIZER \
  {}

using ncclComm_t = struct ncclComm*;
struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};
struct ncclConfig_t {
  int blocking = 1;
};
enum ncclResult_t { ncclSuccess, ncclInProgress };
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
enum ncclDataType_t {
  ncclInt8,
  ncclUint8,
  ncclInt32,
  ncclInt64,
  ncclHalf,
  ncclFloat,
  ncclDouble,
  ncclBfloat16
};

extern "C" {
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
}
