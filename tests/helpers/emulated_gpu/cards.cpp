// What torch lacks without a card before autograd accepts tensors that say they lie on a card: a
// guard (which card and stream a thread works on) and hooks (is CUDA there, how many cards). The
// cards may also be of a kind that torch does not know, as torch_npu's are (PrivateUse1).
//
// No memory and no kernel is here: tensor.py keeps the values on the host.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace cards {
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream, c10::StreamId;

constexpr DeviceIndex kMost = 4;
DeviceType kind = DeviceType::CUDA;
thread_local DeviceIndex device = 0;
thread_local StreamId streams[kMost] = {};  // of this thread, a card each; 0: the default one
std::atomic<long> next_id{1};               // of streams and events

// Tells Python what autograd does by itself. kind: 0 record, 1 wait.
using Listener = void (*)(int kind, long event, int device, long stream);
std::atomic<Listener> listener{nullptr};

void tell(int kind, void* event, const Stream& stream) {
  if (Listener listening = listener) {
    listening(kind, reinterpret_cast<long>(event), stream.device_index(), stream.id());
  }
}

Stream stream_of(Device card, StreamId id) { return Stream(Stream::UNSAFE, card, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kind; }
  DeviceIndex deviceCount() const noexcept override { return kMost; }
  Device getDevice() const override { return Device(kind, device); }
  void setDevice(Device card) const override { device = card.index(); }
  void uncheckedSetDevice(Device card) const noexcept override { device = card.index(); }
  Device exchangeDevice(Device card) const override {
    Device before = getDevice();
    device = card.index();
    return before;
  }

  Stream getStream(Device card) const override { return stream_of(card, streams[card.index()]); }
  Stream getDefaultStream(Device card) const override { return stream_of(card, 0); }
  Stream getNewStream(Device card, int) const override { return stream_of(card, next_id++); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(next_id++);
    tell(0, *event, stream);
  }
  void block(void* event, const Stream& stream) const override { tell(1, event, stream); }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// What both kinds of hooks are asked; only CUDA's have hasCUDA and the two behind it.
template <class Base>
struct Hooks final : Base {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kMost; }
  bool hasCUDA() const { return true; }
  long versionCuDNN() const { return 0; }
  int getNumGPUs() const { return kMost; }
  DeviceIndex current_device() const { return device; }
  DeviceIndex getCurrentDevice() const override { return device; }
  void setCurrentDevice(DeviceIndex index) const override { device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return Device(kind, 0); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

template <class Function>
struct Choice;  // of an attention kernel: 0, the one of plain operations
template <class Number, class... Arguments>
struct Choice<Number (*)(Arguments...)> {
  static Number plain(Arguments...) { return 0; }
};
}  // namespace cards

extern "C" {
// Again when torch is imported: a build for true cards registers a guard and kernels of its own.
void cards_guard() {
  c10::impl::DeviceGuardImplRegistrar(cards::kind, new cards::Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(
      cards::Choice<at::native::fused_sdp_choice_fn>::plain);
}
void cards_register(bool is_cuda) {
  using Cuda = at::CUDAHooksInterface;
  if (!is_cuda) cards::kind = c10::DeviceType::PrivateUse1;
  cards_guard();
  if (is_cuda) {
    auto make = [](at::CUDAHooksArgs) { return std::unique_ptr<Cuda>(new cards::Hooks<Cuda>()); };
    // a build for true cards registers its own as well, later
    at::CUDAHooksRegistry()->Register("CUDAHooks", make, c10::REGISTRY_PREFERRED);
  } else {
    at::RegisterPrivateUse1HooksInterface(new cards::Hooks<at::PrivateUse1HooksInterface>());
  }
}
void cards_listen(cards::Listener heard) { cards::listener = heard; }
int cards_device() { return cards::device; }
void cards_set_device(int device) { cards::device = device; }
long cards_stream(int device) { return cards::streams[device]; }
void cards_set_stream(int device, long stream) { cards::streams[device] = stream; }
long cards_new_id() { return cards::next_id++; }
}
