// Streams and events. Work is executed when it is submitted, which satisfies every order that a program requires.
#include <chrono>

#include "vgpu/src/driver/state.h"

namespace tandem::vgpu::driver {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  unsigned flags = 0;
  bool recorded = false;
  Clock::time_point at;
  std::shared_ptr<Capture> capture = {};  // capture of the stream that recorded it last
};
constexpr unsigned kDisableTiming = 2;

// The default streams, of all threads and of each, have numbers in place of addresses.
bool is_stream(const DriverState& state, const Stream* stream) {
  return reinterpret_cast<uintptr_t>(stream) <= 2 || state.streams.contains(stream);
}

template <class Body>
CUresult with_stream(const char* name, const Stream* stream, Body&& body) {
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    return is_stream(state, stream) ? body(state) : kInvalidHandle;
  });
}

template <class Body>
CUresult with_event(const char* name, const Event* event, Body&& body) {
  return serve(name, Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    return state.events.contains(event) ? body(state) : kInvalidHandle;
  });
}

CUresult done(DriverState&) { return kSuccess; }

const Capture* capture_of(const DriverState& state, const Stream* stream) {
  return state.streams.contains(stream) ? stream->capture.get() : nullptr;
}

// A stream that captures has no work to wait for.
auto done_unless_capturing(const Stream* stream) {
  return [stream](DriverState& state) { return capture_of(state, stream) ? kStreamCaptureUnsupported : kSuccess; };
}

}  // namespace

TANDEM_DRIVER(cuStreamCreateWithPriority, (Stream * *stream, unsigned flags, int priority)) {
  return serve("cuStreamCreateWithPriority", Needs::context, [&](DriverState& state) {
    if (stream == nullptr || flags > 1) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    *stream = new Stream{flags, priority, state.next_id++};
    state.streams.insert(*stream);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamCreate, (Stream * *stream, unsigned flags)) {
  return cuStreamCreateWithPriority(stream, flags, 0);
}
TANDEM_DRIVER(cuStreamDestroy_v2, (Stream * stream)) {
  return serve("cuStreamDestroy", Needs::context, [&](DriverState& state) {
    const std::lock_guard lock(state.mutex);
    if (state.streams.erase(stream) == 0) return kInvalidHandle;
    delete stream;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamSynchronize, (Stream * stream)) {
  return with_stream("cuStreamSynchronize", stream, done_unless_capturing(stream));
}
TANDEM_DRIVER(cuStreamQuery, (Stream * stream)) {
  return with_stream("cuStreamQuery", stream, done_unless_capturing(stream));
}
TANDEM_DRIVER(cuStreamIsCapturing, (Stream * stream, int* capturing)) {
  return with_stream("cuStreamIsCapturing", stream, [&](DriverState& state) {
    *capturing = capture_of(state, stream) != nullptr;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetCaptureInfo_v2,
              (Stream * stream, int* capturing, uint64_t* id, Graph** graph, void*, size_t* dependencies)) {
  return with_stream("cuStreamGetCaptureInfo", stream, [&](DriverState& state) {
    const Capture* const capture = capture_of(state, stream);
    *capturing = capture != nullptr;
    if (id != nullptr) *id = capture ? capture->id : 0;
    if (graph != nullptr) *graph = capture ? capture->graph.get() : nullptr;
    if (dependencies != nullptr) *dependencies = 0;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetCaptureInfo_v3,
              (Stream * stream, int* capturing, uint64_t* id, Graph** graph, void*, void*, size_t* dependencies)) {
  return cuStreamGetCaptureInfo_v2(stream, capturing, id, graph, nullptr, dependencies);
}
TANDEM_DRIVER(cuThreadExchangeStreamCaptureMode, (int* mode)) {
  return serve("cuThreadExchangeStreamCaptureMode", Needs::device, [&](DriverState&) {
    thread_local int now = 0;  // global
    if (mode == nullptr) return kInvalidValue;
    std::swap(*mode, now);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetFlags, (Stream * stream, unsigned* flags)) {
  return with_stream("cuStreamGetFlags", stream, [&](DriverState& state) {
    *flags = state.streams.contains(stream) ? stream->flags : 0;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetPriority, (Stream * stream, int* priority)) {
  return with_stream("cuStreamGetPriority", stream, [&](DriverState& state) {
    *priority = state.streams.contains(stream) ? stream->priority : 0;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetId, (Stream * stream, unsigned long long* id)) {
  return with_stream("cuStreamGetId", stream, [&](DriverState& state) {
    *id = state.streams.contains(stream) ? stream->id : reinterpret_cast<uintptr_t>(stream);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuStreamGetCtx, (Stream * stream, CudaContext** context)) {
  return with_stream("cuStreamGetCtx", stream, [&](DriverState&) { return *context = current_context(), kSuccess; });
}
TANDEM_DRIVER(cuStreamGetDevice, (Stream * stream, CUdevice* device)) {
  return with_stream("cuStreamGetDevice", stream, [&](DriverState&) { return *device = 0, kSuccess; });
}
TANDEM_DRIVER(cuStreamAddCallback,
              (Stream * stream, void (*callback)(Stream*, CUresult, void*), void* data, unsigned)) {
  const CUresult result = with_stream("cuStreamAddCallback", stream, done);
  if (result != kSuccess) return result;
  return submit("cuStreamAddCallback", stream, GraphNode::host,
                [=] { return callback(stream, kSuccess, data), kSuccess; });
}
TANDEM_DRIVER(cuStreamAttachMemAsync, (Stream * stream, CUdeviceptr, size_t, unsigned)) {
  return with_stream("cuStreamAttachMemAsync", stream, done);
}
TANDEM_DRIVER(cuStreamWaitEvent, (Stream * stream, Event* event, unsigned)) {
  return with_event("cuStreamWaitEvent", event, [&](DriverState& state) {
    if (!is_stream(state, stream)) return kInvalidHandle;
    if (!event->capture || !event->capture->active) return kSuccess;
    if (!state.streams.contains(stream)) return kStreamCaptureUnsupported;
    if (!stream->capture) stream->capture = event->capture;
    return stream->capture == event->capture ? kSuccess : kStreamCaptureUnmatched;
  });
}

TANDEM_DRIVER(cuEventCreate, (Event * *event, unsigned flags)) {
  return serve("cuEventCreate", Needs::context, [&](DriverState& state) {
    if (event == nullptr) return kInvalidValue;
    const std::lock_guard lock(state.mutex);
    *event = new Event{flags, false, {}, {}};
    state.events.insert(*event);
    return kSuccess;
  });
}
TANDEM_DRIVER(cuEventDestroy_v2, (Event * event)) {
  return with_event("cuEventDestroy", event, [&](DriverState& state) {
    state.events.erase(event);
    delete event;
    return kSuccess;
  });
}
TANDEM_DRIVER(cuEventRecord, (Event * event, Stream* stream)) {
  return with_event("cuEventRecord", event, [&](DriverState& state) {
    if (!is_stream(state, stream)) return kInvalidHandle;
    event->capture = state.streams.contains(stream) ? stream->capture : nullptr;
    event->recorded = true;
    event->at = Clock::now();
    return kSuccess;
  });
}
TANDEM_DRIVER(cuEventRecordWithFlags, (Event * event, Stream* stream, unsigned)) {
  return cuEventRecord(event, stream);
}
TANDEM_DRIVER(cuEventSynchronize, (Event * event)) { return with_event("cuEventSynchronize", event, done); }
TANDEM_DRIVER(cuEventQuery, (Event * event)) { return with_event("cuEventQuery", event, done); }
TANDEM_DRIVER(cuEventElapsedTime, (float* milliseconds, Event* begin, Event* end)) {
  return with_event("cuEventElapsedTime", begin, [&](DriverState& state) {
    if (milliseconds == nullptr || !state.events.contains(end)) return kInvalidHandle;
    if (!begin->recorded || !end->recorded || ((begin->flags | end->flags) & kDisableTiming)) return kInvalidHandle;
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
    return kSuccess;
  });
}
TANDEM_DRIVER(cuEventElapsedTime_v2, (float* milliseconds, Event* begin, Event* end)) {
  return cuEventElapsedTime(milliseconds, begin, end);
}

TANDEM_DRIVER_ALIAS(cuStreamSynchronize_ptsz, cuStreamSynchronize);
TANDEM_DRIVER_ALIAS(cuStreamQuery_ptsz, cuStreamQuery);
TANDEM_DRIVER_ALIAS(cuStreamIsCapturing_ptsz, cuStreamIsCapturing);
TANDEM_DRIVER_ALIAS(cuStreamGetFlags_ptsz, cuStreamGetFlags);
TANDEM_DRIVER_ALIAS(cuStreamGetPriority_ptsz, cuStreamGetPriority);
TANDEM_DRIVER_ALIAS(cuStreamGetCtx_ptsz, cuStreamGetCtx);
TANDEM_DRIVER_ALIAS(cuStreamAddCallback_ptsz, cuStreamAddCallback);
TANDEM_DRIVER_ALIAS(cuStreamWaitEvent_ptsz, cuStreamWaitEvent);
TANDEM_DRIVER_ALIAS(cuEventRecord_ptsz, cuEventRecord);
TANDEM_DRIVER_ALIAS(cuEventRecordWithFlags_ptsz, cuEventRecordWithFlags);

}  // namespace tandem::vgpu::driver
