// Stands in for Gloo's header, which LibTorch does not ship: what
// ProcessGroupGloo.hpp names, as declarations alone. The real classes live in
// libtorch_cpu; c10d's objects hold them only through pointers, so nothing here
// decides a layout. Trap: never construct GlooStore, SendWork or RecvWork.
#pragma once
