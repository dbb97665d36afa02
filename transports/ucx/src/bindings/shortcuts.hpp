// The native ledger of a communicator, which starts plain ops in one call from the program to the engine.
#pragma once

#include <nanobind/nanobind.h>

namespace aiocomms {

void define_shortcuts(nanobind::module_& module);

}  // namespace aiocomms
