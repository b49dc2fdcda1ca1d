#include "context_parallel/transport.h"

#include "base/text.h"

namespace tandem::context_parallel {
namespace {

Status check_result(const tandem_cp_transport& transport, const char* call, int32_t result) {
  if (result == 0) return {};
  const char* error = transport.last_error != nullptr ? transport.last_error(transport.user_data) : nullptr;
  return {TANDEM_DEVICE_ERROR,
          str_cat("transport.", call, " (returned ", result, ") must return 0: ",
                  error != nullptr ? error : "read the transport's own error on this and the other ranks")};
}

std::vector<tandem_cp_message> list(std::vector<std::pair<int32_t, RowMemory>>& messages) {
  std::vector<tandem_cp_message> list;
  for (auto& [peer, bytes] : messages) {
    if (bytes.size() > 0) list.push_back({bytes.data(), bytes.size(), peer, 0});
  }
  return list;
}

template <class T>
Status gather(const tandem_cp_transport& transport, std::span<const T> values, std::vector<T>* all) {
  all->resize(values.size() * static_cast<size_t>(transport.ranks));
  const auto bytes = static_cast<int64_t>(values.size_bytes());
  return check_result(transport, "all_gather",
                      transport.all_gather(transport.user_data, values.data(), all->data(), bytes));
}

}  // namespace

Status Exchange::start(const tandem_cp_transport& transport, Messages messages) {
  messages_ = std::move(messages);
  const auto sends = list(messages_.sends), receives = list(messages_.receives);
  if (sends.empty() && receives.empty()) return {};
  TANDEM_TRY(check_result(transport, "exchange",
                          transport.exchange(transport.user_data, sends.data(), std::ssize(sends), receives.data(),
                                             std::ssize(receives), &request_)));
  transport_ = &transport;
  return {};
}

Status Exchange::wait() {
  if (transport_ == nullptr) return {};
  const tandem_cp_transport& transport = *std::exchange(transport_, nullptr);
  return check_result(transport, "wait", transport.wait(transport.user_data, request_));
}

Status all_gather(const tandem_cp_transport& transport, std::span<const double> values, std::vector<double>* all) {
  return gather(transport, values, all);
}

Status all_gather(const tandem_cp_transport& transport, std::span<const uint64_t> values, std::vector<uint64_t>* all) {
  return gather(transport, values, all);
}

}  // namespace tandem::context_parallel
