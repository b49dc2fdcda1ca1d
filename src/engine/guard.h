// The boundary of the library: an error becomes a code and this thread's last message. No exception leaves the library.
#pragma once

#include <exception>
#include <new>

#include "base/status.h"

namespace tandem {

// Stores the message for tandem_last_error() and returns the code.
tandem_status report(tandem_status code, const char* sentence) noexcept;

// Runs body(), which returns a Status.
template <class Body>
tandem_status guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? TANDEM_OK : report(status.code, status.message.c_str());
  } catch (const std::bad_alloc&) {
    return report(TANDEM_INTERNAL_ERROR, "the host is out of memory: free memory, or split the call over heads");
  } catch (const std::exception& error) {
    return report(TANDEM_INTERNAL_ERROR, error.what());
  } catch (...) {
    return report(TANDEM_INTERNAL_ERROR, "the library threw an unknown exception: report the call as a defect");
  }
}

}  // namespace tandem
