// What launching kernels one by one costs, beside one graph of the same kernels. Prints one line of JSON, in microseconds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                  \
    do {                                                                             \
        cudaError_t status = (call);                                                 \
        if (status != cudaSuccess) {                                                 \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));     \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

// As many arguments as a small kernel of an engine has. Lasts `cycles` of the card's clock.
__global__ void spin(long long cycles, const float *a, const float *b, float *c, int n, int m) {
    long long start = clock64();
    while (clock64() - start < cycles) {
    }
    if (n < 0) c[m] = a[m] + b[m];
}

static double now_us() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

static double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

// The card's time for `count` kernels, each launched by itself or all by one graph.
static double card_us(cudaStream_t stream, int count, long long cycles, bool by_graph) {
    cudaGraphExec_t replayed = nullptr;
    if (by_graph) {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < count; i++) spin<<<1, 32, 0, stream>>>(cycles, nullptr, nullptr, nullptr, 0, 0);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&replayed, graph, 0));
    }
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> found;
    for (int round = 0; round < 21; round++) {
        CHECK(cudaEventRecord(begin, stream));
        if (by_graph)
            CHECK(cudaGraphLaunch(replayed, stream));
        else
            for (int i = 0; i < count; i++) spin<<<1, 32, 0, stream>>>(cycles, nullptr, nullptr, nullptr, 0, 0);
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms = 0.0f;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (round) found.push_back(1e3 * ms);
    }
    return median(found);
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const int burst = 80, count = 800;
    std::vector<double> host;
    for (int round = 0; round < 500; round++) {
        CHECK(cudaStreamSynchronize(stream));
        double start = now_us();
        for (int i = 0; i < burst; i++) spin<<<1, 32, 0, stream>>>(0, nullptr, nullptr, nullptr, 0, 0);
        if (round >= 20) host.push_back((now_us() - start) / burst);
    }
    const long long cycles = 20000;  // some 10 us: longer than a launch, so that the card never waits for the host
    double eager = card_us(stream, count, cycles, false), graph = card_us(stream, count, cycles, true);
    std::printf("{\"launch_us\": %.3f, \"eager_gap_us\": %.3f, \"kernel_us\": %.3f}\n", median(host),
                (eager - graph) / count, graph / count);
    return 0;
}
