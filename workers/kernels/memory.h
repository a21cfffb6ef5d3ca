// Memory that a thread keeps between calls, from the start of a cache line. A vector that lies across
// two lines takes two loads; and out of whole lines matrix registers are loaded six times as fast, and
// a product of such tiles is three times as fast (Emerald Rapids, all of it in the L1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace {

class Memory {
  public:
    // Room for so many elements. What was there before is lost.
    template <typename Element>
    Element* of(int64_t count) {
        const size_t size = count * sizeof(Element);
        if (size > size_) {
            bytes_.reset();
            bytes_.reset(static_cast<char*>(operator new(size, LINE)));
            size_ = size;
        }
        return reinterpret_cast<Element*>(bytes_.get());
    }

  private:
    static constexpr std::align_val_t LINE{64};

    struct Free {
        void operator()(char* bytes) const { operator delete(bytes, LINE); }
    };

    std::unique_ptr<char[], Free> bytes_;
    size_t size_ = 0;
};

}  // namespace
