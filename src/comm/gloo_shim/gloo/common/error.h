// See algorithm.h. ProcessGroupGloo.hpp includes this header and uses nothing from it.
#pragma once
