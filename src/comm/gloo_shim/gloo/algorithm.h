// Replaces Gloo's header, which LibTorch does not ship. Declares the names that
// ProcessGroupGloo.hpp uses. The real classes are in libtorch_cpu. c10d's objects hold them only
// through pointers, so nothing here decides a layout. Never construct GlooStore, SendWork or
// RecvWork.
#pragma once
