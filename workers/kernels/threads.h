// Work shared among a few threads, on a machine that has other things to do as well.
//
// OpenMP gives each thread its part and waits for all of them. When another process has taken one
// of the cores, every parallel region then lasts as long as the system keeps that thread away:
// milliseconds, a hundred times a step. Here the caller publishes a job of many items and begins to
// take items itself; helpers take what is left when they get to run. The caller waits only for items
// that a helper has begun, never for a helper to come.
//
//     next = (generation, item)     one word, claimed by compare-and-swap
//
// A helper reads `next`, then the job, and then claims. While an item of a generation is unclaimed,
// its job cannot end; so if the claim succeeds, what was read belonged to it. Before the next job is
// written, `next` becomes (generation + 1, CLOSED), so that a claim on the old word fails.
//
// A helper that finds nothing to do looks for a while, then sleeps, and to wake it takes longer than
// most jobs do. While somebody holds an `Awake`, it lets others run instead, if there are any, and
// looks again, for as long as the work of a single thread between two jobs may take. What one thread
// writes while another looks lies in cache lines apart.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace raywire {

class Pool {
  public:
    using Function = void (*)(void* closure, int64_t item);

    // Run `function(closure, item)` for each item on up to `num_threads` threads; while another
    // caller has the helpers, on its own.
    void run(int64_t num_items, int num_threads, Function function, void* closure) {
        if (num_threads < 2 || num_items < 2 || is_taken_.exchange(true)) {
            for (int64_t item = 0; item < num_items; ++item) function(closure, item);
            return;
        }
        while (num_helpers_ < num_threads - 1) start_helper();
        const uint64_t generation = (next_.load(std::memory_order_relaxed) >> 32) + 1;
        next_.store(generation << 32 | CLOSED);
        num_items_.store(uint32_t(num_items));
        num_wanted_.store(num_threads - 1);
        function_.store(function);
        closure_.store(closure);
        num_open_.store(uint32_t(num_items));
        next_.store(generation << 32);
        bell_.fetch_add(1);
        bell_.notify_all();
        work();
        for (int spins = 0; num_open_.load() != 0; ++spins)
            spins < SPINS ? pause() : std::this_thread::yield();
        is_taken_.store(false);
    }

    void begin_awake() { num_awake_.fetch_add(1); }
    void end_awake() { num_awake_.fetch_sub(1); }

  private:
    static constexpr uint64_t CLOSED = 0xffffffff;
    static constexpr int SPINS = 2000;   // some tens of microseconds: the time between two jobs
    static constexpr int YIELDS = 1000;  // some hundreds, if nobody else wants to run

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    void work() {
        for (;;) {
            uint64_t next = next_.load();
            const uint32_t item = uint32_t(next);
            const Function function = function_.load();
            void* closure = closure_.load();
            if (item == CLOSED || item >= num_items_.load()) return;
            if (!next_.compare_exchange_weak(next, next + 1)) continue;
            function(closure, item);
            num_open_.fetch_sub(1);
        }
    }

    void start_helper() {
        const int index = num_helpers_++;
        std::thread([this, index] {
            uint32_t heard = 0;
            for (;;) {
                for (int spins = 0; bell_.load() == heard; ++spins) {
                    if (spins < SPINS)
                        pause();
                    else if (num_awake_.load() > 0 && spins < SPINS + YIELDS)
                        std::this_thread::yield();
                    else
                        bell_.wait(heard);
                }
                heard = bell_.load();
                if (index < num_wanted_.load()) work();
            }
        }).detach();
    }

    int num_helpers_ = 0;
    std::atomic<bool> is_taken_{false};
    std::atomic<int> num_awake_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};       // looked at by helpers without work
    alignas(64) std::atomic<uint64_t> next_{CLOSED};  // claimed by all
    alignas(64) std::atomic<uint32_t> num_open_{0};   // counted down by all
    alignas(64) std::atomic<uint32_t> num_items_{0};  // written once a job
    std::atomic<int> num_wanted_{0};
    std::atomic<Function> function_{nullptr};
    std::atomic<void*> closure_{nullptr};
};

// The only one of this process; never destroyed, because its threads never end.
inline Pool& pool() {
    static Pool* pool = new Pool;
    return *pool;
}

// Keeps helpers from sleeping as long as it lives: for a run of jobs one soon after the other.
struct Awake {
    Awake() { pool().begin_awake(); }
    ~Awake() { pool().end_awake(); }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
};

// Call `body(item)` for each item below `num_items`.
template <typename Body>
void parallel_for(int64_t num_items, int num_threads, const Body& body) {
    pool().run(
        num_items, num_threads,
        [](void* closure, int64_t item) { (*static_cast<const Body*>(closure))(item); },
        const_cast<Body*>(&body));
}

}  // namespace raywire
