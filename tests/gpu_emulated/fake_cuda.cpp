// Lets torch run its CUDA paths on fake tensors without a GPU: a device guard and hooks of "cuda" that do nothing,
// page-locked memory that is ordinary memory, and the choice of attention kernels of an H100.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 8;

thread_local DeviceIndex current = 0;

struct Guard final : public c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    Device exchangeDevice(Device device) const override {
        const auto before = current;
        current = device.index();
        return {DeviceType::CUDA, before};
    }
    Device getDevice() const override { return {DeviceType::CUDA, current}; }
    void setDevice(Device device) const override { current = device.index(); }
    void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
    Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
    Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
    Stream exchangeStream(Stream stream) const noexcept override { return Stream(Stream::DEFAULT, stream.device()); }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const DeviceIndex) const noexcept override {}
    bool queryStream(const Stream&) const override { return true; }
    void synchronizeStream(const Stream&) const override {}
};

// Blocks of memory that count as page-locked, by address.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void free_pinned(void* address) {
    {
        const std::lock_guard<std::mutex> guard(pinned_lock);
        pinned.erase(static_cast<const char*>(address));
    }
    std::free(address);
}

struct PinnedAllocator final : public c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void* address = nullptr;
        TORCH_CHECK(posix_memalign(&address, 64, size ? size : 1) == 0, "no memory of ", size, " bytes");
        const std::lock_guard<std::mutex> guard(pinned_lock);
        pinned[static_cast<const char*>(address)] = size ? size : 1;
        return {address, address, &free_pinned, Device(DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* target, const void* source, std::size_t size) const override {
        default_copy_data(target, source, size);
    }
};

// torch asks for the hooks by the name of this class.
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return false; }
    int getNumGPUs() const override { return kDevices; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex device) const override { current = device; }
    bool isPinnedPtr(const void* data) const override {
        const auto* address = static_cast<const char*>(data);
        const std::lock_guard<std::mutex> guard(pinned_lock);
        auto block = pinned.upper_bound(address);
        if (block == pinned.begin()) return false;
        --block;
        return address < block->first + block->second;
    }
    at::Allocator* getPinnedMemoryAllocator() const override {
        static PinnedAllocator allocator;
        return &allocator;
    }
    at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// Choose as torch does on an H100: flash attention for half precision without a mask, else the memory-efficient kernel.
int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
    const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
    return static_cast<int64_t>(half && !mask ? at::SDPBackend::flash_attention : at::SDPBackend::efficient_attention);
}

}  // namespace

// cudaHostRegister and cudaHostUnregister: 0 is success.
extern "C" int fake_host_register(const char* address, size_t size) {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[address] = size;
    return 0;
}

extern "C" int fake_host_unregister(const char* address) {
    const std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.erase(address) == 1 ? 0 : 1;
}

namespace at {
using ::CUDAHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}

// Replace also what a CUDA build of torch has registered when it was imported.
extern "C" void fake_register() {
    c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new Guard());
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}
