// See algorithm.h: included by ProcessGroupGloo.hpp, which uses nothing of it.
#pragma once
