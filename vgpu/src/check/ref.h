// Shared ownership within a cluster. Events of one cluster are never concurrent, so that counts need not be atomic.
#pragma once

#include <utility>

namespace tandem::vgpu::check {

// T has a member `int references = 0`. The last Ref deletes the object.
template <class T>
class Ref {
 public:
  Ref() = default;
  explicit Ref(T* p) : p_(p) { add(); }
  Ref(const Ref& other) : p_(other.p_) { add(); }
  Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(p_, other.p_);
    return *this;
  }
  ~Ref() {
    if (p_ && --p_->references == 0) delete p_;
  }

  T* get() const { return p_; }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }
  explicit operator bool() const { return p_ != nullptr; }
  friend bool operator==(const Ref& a, const Ref& b) { return a.p_ == b.p_; }
  // Returns true if no other reference would observe a change.
  bool unique() const { return p_ && p_->references == 1; }

 private:
  void add() {
    if (p_) ++p_->references;
  }
  T* p_ = nullptr;
};

}  // namespace tandem::vgpu::check
