// The host side: a device whose limits a test can set, and launches that are checked as a driver
// would, run at once and recorded.
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "block.h"
#include "control.h"
#include "shared_memory.h"

namespace simt {
namespace {

constexpr int kSharedWithoutOptIn = 48 * 1024;
constexpr int kSharedPerBlock = 227 * 1024;

// Two multiprocessors, so that a grid of one block for each is small; the other limits are those of
// compute capability 9.0.
const std::map<cudaDeviceAttr, int> kDefaults = {
    {cudaDevAttrMultiProcessorCount, 2},
    {cudaDevAttrWarpSize, warpSize},
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrMaxSharedMemoryPerBlock, kSharedWithoutOptIn},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedPerBlock},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 * 1024},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrL2CacheSize, 50 * 1024 * 1024},
};

std::map<cudaDeviceAttr, int> attributes = kDefaults;

// cudaFuncAttributeMaxDynamicSharedMemorySize of each kernel that has one.
std::map<const void*, int> shared_opt_in;

std::vector<Launch> launches;
Schedule schedule;
cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t refuse(cudaError_t error, const std::string& why) {
  report(why);
  return fail(error);
}

std::string text(const dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

uint64_t volume(const dim3& d) {
  return uint64_t{d.x} * d.y * d.z;
}

// What the driver refuses before any thread runs.
cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel) {
  const dim3 grid = config.gridDim;
  const dim3 block = config.blockDim;
  if (volume(grid) == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return refuse(cudaErrorInvalidConfiguration,
                  "launch: the grid must be 1..2^31-1 by 1..65535 by 1..65535, got " + text(grid));
  }
  if (volume(block) == 0 || volume(block) > 1024 || block.z > 64) {
    return refuse(cudaErrorInvalidConfiguration,
                  "launch: a block must have 1..1024 threads, got " + text(block));
  }
  const auto opted_in = shared_opt_in.find(kernel);
  const int most = opted_in == shared_opt_in.end() ? kSharedWithoutOptIn : opted_in->second;
  if (config.dynamicSmemBytes > static_cast<size_t>(most)) {
    return refuse(cudaErrorInvalidValue, "launch: shared memory is limited to " +
                                             std::to_string(most) +
                                             " bytes without a larger cudaFuncSetAttribute, got " +
                                             std::to_string(config.dynamicSmemBytes));
  }
  if (config.numAttrs != 0) {
    return refuse(cudaErrorNotSupported, "launch: launch attributes are not modelled");
  }
  return cudaSuccess;
}

const std::function<void()>* running_body = nullptr;

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   const std::function<void()>& thread) {
  const cudaError_t error = check_launch(config, kernel);
  if (error != cudaSuccess) {
    fault.kernel = kernel;
    return error;
  }
  launches.push_back({kernel,
                      {config.gridDim.x, config.gridDim.y, config.gridDim.z},
                      {config.blockDim.x, config.blockDim.y, config.blockDim.z},
                      static_cast<int64_t>(config.dynamicSmemBytes),
                      config.stream});
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  running_body = &thread;

  // Blocks, too, may run in any order.
  std::vector<unsigned> turns(volume(gridDim));
  std::iota(turns.begin(), turns.end(), 0u);
  if (schedule.order == Order::kDescending) std::reverse(turns.begin(), turns.end());
  if (schedule.order == Order::kShuffled) std::shuffle(turns.begin(), turns.end(), schedule.random);
  for (const unsigned turn : turns) {
    blockIdx = {turn % gridDim.x, turn / gridDim.x % gridDim.y, turn / gridDim.x / gridDim.y};
    if (!run_block(kernel, [] { (*running_body)(); }, config.dynamicSmemBytes, schedule)) {
      return fail(cudaErrorLaunchFailure);
    }
  }
  return cudaSuccess;
}

}  // namespace simt

// The toolkit's C functions (declared in its cuda_runtime_api.h), as far as launchers use them.
extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const auto found = simt::attributes.find(attribute);
  if (device != 0) return simt::fail(cudaErrorInvalidDevice);
  if (found == simt::attributes.end()) {
    return simt::refuse(cudaErrorInvalidValue, "cudaDeviceGetAttribute: attribute " +
                                                   std::to_string(attribute) + " is not modelled");
  }
  *value = found->second;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;  // a hint
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return simt::refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute: attribute " +
                                                   std::to_string(attribute) + " is not modelled");
  }
  const int most = simt::attributes.at(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (value < 0 || value > most) {
    return simt::refuse(cudaErrorInvalidValue,
                        "cudaFuncSetAttribute: shared memory is limited to " +
                            std::to_string(most) + " bytes a block, got " + std::to_string(value));
  }
  simt::shared_opt_in[kernel] = value;
  return cudaSuccess;
}

// By threads, blocks and shared memory; registers are not modelled.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_size,
                                                          size_t dynamic_shared) {
  if (block_size < 1) return simt::fail(cudaErrorInvalidValue);
  const auto limit = [](cudaDeviceAttr attribute) { return simt::attributes.at(attribute); };
  const int shared =
      static_cast<int>(dynamic_shared) + limit(cudaDevAttrReservedSharedMemoryPerBlock);
  *blocks = std::min({limit(cudaDevAttrMaxBlocksPerMultiprocessor),
                      limit(cudaDevAttrMaxThreadsPerMultiProcessor) / block_size,
                      limit(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / shared});
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() {
  return simt::last_error;
}

cudaError_t cudaGetLastError() {
  return std::exchange(simt::last_error, cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    default:
      return "an error that the interpreter does not give";
  }
}

// For the tests: see control.h.
void simt_reset() {
  simt::attributes = simt::kDefaults;
  simt::shared_opt_in.clear();
  simt::launches.clear();
  simt::schedule = {};
  simt::fault = {};
  simt::last_error = cudaSuccess;
}

void simt_set_attribute(int attribute, int value) {
  simt::attributes[static_cast<cudaDeviceAttr>(attribute)] = value;
}

void simt_set_order(int order, unsigned seed) {
  simt::schedule.order = static_cast<simt::Order>(order);
  simt::schedule.random.seed(seed);
}

int64_t simt_launch_count() {
  return static_cast<int64_t>(simt::launches.size());
}

const simt::Launch* simt_launch(int64_t i) {
  return &simt::launches.at(i);
}

const char* simt_fault_text() {
  return simt::fault.text.c_str();
}

const void* simt_fault_kernel() {
  return simt::fault.kernel;
}

}  // extern "C"
