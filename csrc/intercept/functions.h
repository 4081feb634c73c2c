// PyTorch's functions, computed by memopt's ops inside a converted model: its activations, in place
// too (activations.cpp), dropout, layer_norm and rms_norm, and the norms over channels
// (channel_norms.cpp), whichever way they are called (torch.nn.functional, torch, a tensor's
// method, another library's C++).
//
// Sums and products are PyTorch's own, but the registry of recipes is told of them
// (elementwise.cpp).
//
// They are found below Python (key.h). Nothing of PyTorch's is replaced: its names stay the objects
// they are, other threads and code outside the scope do not come here, and where a call is not
// taken PyTorch's own kernels run with the same arguments. A TorchFunctionMode would cost some 3 us
// for every call of any function and every attribute of a tensor.
#pragma once

#include <ATen/autocast_mode.h>

namespace memopt::intercept {

// Not for devices that autocast does not know (meta), of which PyTorch's own question raises.
inline bool is_autocast_on(c10::DeviceType device) {
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

// From here on this thread's calls of the functions are memopt's, whether or not a scope says so
// (here.h). To be ended as often as it was begun; an end that this thread has not begun does
// nothing.
void begin_functions();
void end_functions();

// Whether this thread's calls are PyTorch's in any case; returns what was set before.
bool pause_functions(bool paused);
bool functions_are_paused();

}  // namespace memopt::intercept
