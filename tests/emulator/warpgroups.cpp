// What a block of compute capability 9.0 waits for by barriers of its own: copies of boxes, and the
// matrix instructions of warpgroups.
//
// A copy lands at once, or as late as it can: when no thread can go on. Until it has landed any
// access to its place is a fault, and afterwards one by a thread that has not waited for it. A
// product is computed when it is waited for; until then its result is NaN, and whoever writes to an
// operand disturbs it.
#include "turns.h"
#include "boxes.h"
#include "numbers.h"
#include "races.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

namespace emulator {
namespace {

using races::fault;
using turns::current;

// Ends the launch; names the function and the line that called it.
template <typename... Given>
[[noreturn]] void wrong(const char* what, Where where, const char* format, Given... given) {
  char text[600];
  std::snprintf(text, sizeof(text), format, given...);
  fault(0, "%s (%s:%d): %s", what, where.file, where.line, text);
}

// -- barriers -------------------------------------------------------------------------------------

struct Barrier {
  int arrivals = 0;  // of each phase
  int missing = 0;
  long long bytes = 0;  // that are expected and have not come
  unsigned int phase = 0;
  bool published = false;
  races::Clocks coming, over;  // what those knew who arrived in this phase, and before

  void end_phase() {
    if (missing || bytes) return;
    over = coming;
    missing = arrivals;
    ++phase;
  }
};

struct Numbered {
  int threads = 0, come = 0;
  unsigned int times = 0;
  bool votes = false, any = false, found = false;
  races::Clocks coming, over;
};

std::map<unsigned int, Barrier> barriers;
std::map<int, Numbered> numbered;

char* shared_at(unsigned int address) { return static_cast<char*>(shared_memory()) + address; }

Barrier& barrier_at(const char* what, Where where, unsigned int address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) wrong(what, where, "no barrier is at %u", address);
  races::access(shared_at(address), 8, false);
  return found->second;
}

// -- copies ---------------------------------------------------------------------------------------

struct Transfer {
  unsigned int to;
  std::vector<char> bytes;
  unsigned int barrier;
  races::Clocks begun;
};

std::vector<Transfer> transfers;

void land(std::size_t n) {
  const Transfer& transfer = transfers[n];
  std::memcpy(shared_at(transfer.to), transfer.bytes.data(), transfer.bytes.size());
  races::finish_transfer(shared_at(transfer.to), transfer.bytes.size(), transfer.begun);
  Barrier& barrier = barriers[transfer.barrier];
  barrier.coming.join(transfer.begun);
  barrier.bytes -= static_cast<long long>(transfer.bytes.size());
  transfers.erase(transfers.begin() + static_cast<std::ptrdiff_t>(n));
  barrier.end_phase();
}

// -- products -------------------------------------------------------------------------------------

struct Product {
  unsigned int group;
  float* d;
  int columns;
  bool in_registers, add, brain, floats;
  Wide wide;
  unsigned int a[4];
  unsigned long long a_described, b_described;
  Codes a_codes = NO_CODES, b_codes = NO_CODES;
  Part part = {};

  // How many numbers of d a thread holds, and where element n of row r is among them.
  unsigned int size() const { return static_cast<unsigned int>(part.of ? part.of : columns) / 2; }
  unsigned int place(unsigned int r, unsigned int n) const {
    return r * size() / 2 + static_cast<unsigned int>(part.first) / 4 + n;
  }
  bool is_like(const Product& other) const {
    return columns == other.columns && part.first == other.part.first && part.of == other.part.of &&
           in_registers == other.in_registers && add == other.add && floats == other.floats &&
           wide == other.wide && a_codes == other.a_codes && b_codes == other.b_codes &&
           a_described == other.a_described && b_described == other.b_described;
  }
};

struct Issuer {
  std::vector<Product> products;
  unsigned int groups = 0;
  bool fenced = false;
  std::map<float*, std::vector<float>> held;  // what results in flight had before
};

std::map<int, Issuer> issuers;

// What matrix instructions take of a float32.
double cut_number(unsigned int bits) {
  const unsigned int kept = bits & 0xffffe000u;
  float value;
  std::memcpy(&value, &kept, sizeof(value));
  return static_cast<double>(value);
}

// An operand of 16-bit elements in shared memory: rows and columns as they lie there. A float32
// takes two columns.
struct SmemDesc {
  unsigned int start, slab, eight_rows;

  SmemDesc(const char* what, Where where, unsigned long long bits)
      : start((bits & 0x3fff) << 4),
        slab((bits >> 16 & 0x3fff) << 4),
        eight_rows((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1 || (bits >> 46 & 0xffff)) {
      wrong(what, where, "an operand without the swizzle of 128 bytes");
    }
  }
  // The bytes of element (row, column), whose row is a line of a slab of 64 columns.
  const char* at(unsigned int row, unsigned int column) const {
    const unsigned int place =
        start + column / 64 * slab + row / 8 * eight_rows + row % 8 * 128 + column % 64 * 2;
    return shared_at(place ^ (place >> 7 & 7) << 4);
  }
  double element(unsigned int row, unsigned int column, bool brain) const {
    unsigned short bits;
    std::memcpy(&bits, at(row, column), sizeof(bits));
    return widened(bits, 0, brain);
  }
  double number(unsigned int row, unsigned int column) const {
    unsigned int bits;
    std::memcpy(&bits, at(row, 2 * column), sizeof(bits));
    return cut_number(bits);
  }
  double code(unsigned int row, unsigned int column, Codes codes) const {
    const unsigned char bits = static_cast<unsigned char>(at(row, column / 2)[column % 2]);
    return widened_code(bits, codes == E4M3);
  }
  void read(unsigned int rows, unsigned int columns) const {
    for (unsigned int r = 0; r < rows; ++r) {
      for (unsigned int c = 0; c < columns; c += 8) races::read_published(at(r, c), 16);
    }
  }
};

void read_operands(const char* what, Where where, const Product& product) {
  const auto n = static_cast<unsigned int>(product.columns);
  const SmemDesc b(what, where, product.b_described);
  if (!product.floats && !product.b_codes && (product.in_registers || product.wide != NONE_WIDE)) {
    b.read(16, n);
  } else {
    b.read(n, 16);
  }
  if (product.in_registers) return;
  const SmemDesc a(what, where, product.a_described);
  if (product.wide == BOTH_WIDE) {
    a.read(16, 64);
  } else {
    a.read(64, 16);
  }
}

// A NaN that no arithmetic leaves as it is.
constexpr unsigned int UNTOUCHED = 0xffbfffffu;

// Adds a product of 64 x `deep` and `deep` x columns to what the threads of a warpgroup hold of d;
// sums of so many products are cut off.
void add_product(int first, std::size_t number, const std::vector<double>& left,
                 const std::vector<double>& right, unsigned int deep, unsigned int together) {
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    Issuer& issuer = issuers[first + static_cast<int>(t)];
    const Product& own = issuer.products[number];
    const auto columns = static_cast<unsigned int>(own.columns);
    std::vector<float>& d = issuer.held[own.d];
    for (unsigned int x = 0; x < columns / 2; ++x) {
      const unsigned int r = x / (columns / 4), n = x % (columns / 4);
      const unsigned int row = t / 32 * 16 + t % 32 / 4 + 8 * r;
      const unsigned int column = n / 2 * 8 + t % 4 * 2 + n % 2;
      float& of_thread = d[own.place(r, n)];
      float sum = own.add ? of_thread : 0.0f;
      for (unsigned int k = 0; k < deep; k += together) {
        double exact = static_cast<double>(sum);
        for (unsigned int y = k; y < k + together; ++y) {
          exact += left[row * deep + y] * right[y * columns + column];
        }
        sum = cut_off(exact);
      }
      of_thread = sum;
    }
  }
}

void compute_floats(const char* what, Where where, int first, std::size_t number) {
  const Product& one = issuers[first].products[number];
  const SmemDesc b(what, where, one.b_described);
  const auto columns = static_cast<unsigned int>(one.columns);
  std::vector<double> right(8 * columns), left(64 * 8);
  for (unsigned int k = 0; k < 8; ++k) {
    for (unsigned int n = 0; n < columns; ++n) right[k * columns + n] = b.number(n, k);
  }
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    const Product& own = issuers[first + static_cast<int>(t)].products[number];
    for (unsigned int x = 0; x < 4; ++x) {
      const unsigned int row = t / 32 * 16 + t % 32 / 4 + x % 2 * 8;
      left[row * 8 + t % 4 + x / 2 * 4] = cut_number(own.a[x]);
    }
  }
  add_product(first, number, left, right, 8, 4);
}

void compute_codes(const char* what, Where where, int first, std::size_t number) {
  constexpr unsigned int DEEP = 32;
  const Product& one = issuers[first].products[number];
  const SmemDesc b(what, where, one.b_described);
  const auto columns = static_cast<unsigned int>(one.columns);
  std::vector<double> right(DEEP * columns), left(64 * DEEP);
  for (unsigned int k = 0; k < DEEP; ++k) {
    for (unsigned int n = 0; n < columns; ++n) right[n * DEEP + k] = b.code(n, k, one.b_codes);
  }
  if (one.in_registers) {
    for (unsigned int t = 0; t < WARPGROUP; ++t) {
      const Product& own = issuers[first + static_cast<int>(t)].products[number];
      for (unsigned int x = 0; x < 16; ++x) {
        const unsigned int row = t / 32 * 16 + t % 32 / 4 + x / 4 % 2 * 8;
        const unsigned int k = t % 4 * 4 + x / 8 * 16 + x % 4;
        left[row * DEEP + k] = widened_code(own.a[x / 4] >> x % 4 * 8 & 0xff, one.a_codes == E4M3);
      }
    }
  } else {
    const SmemDesc a(what, where, one.a_described);
    for (unsigned int row = 0; row < 64; ++row) {
      for (unsigned int k = 0; k < DEEP; ++k) left[row * DEEP + k] = a.code(row, k, one.a_codes);
    }
  }
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    Issuer& issuer = issuers[first + static_cast<int>(t)];
    const Product& own = issuer.products[number];
    std::vector<float>& d = issuer.held[own.d];
    for (unsigned int x = 0; x < columns / 2; ++x) {
      const unsigned int r = x / (columns / 4), n = x % (columns / 4);
      const unsigned int row = t / 32 * 16 + t % 32 / 4 + 8 * r;
      const unsigned int column = n / 2 * 8 + t % 4 * 2 + n % 2;
      double terms[DEEP + 1];
      for (unsigned int k = 0; k < DEEP; ++k) {
        terms[k] = left[row * DEEP + k] * right[column * DEEP + k];
      }
      terms[DEEP] = own.add ? static_cast<double>(d[x]) : 0.0;
      d[x] = sum_of_codes(terms, DEEP + 1);
    }
  }
}

// Computes one product of a whole warpgroup, whose threads hold their parts of d.
void compute(const char* what, Where where, int first, std::size_t number) {
  const Product& one = issuers[first].products[number];
  if (one.b_codes) return compute_codes(what, where, first, number);
  if (one.floats) return compute_floats(what, where, first, number);
  const SmemDesc b(what, where, one.b_described);
  const auto columns = static_cast<unsigned int>(one.columns);
  std::vector<double> right(16 * columns), left(64 * 16);
  for (unsigned int k = 0; k < 16; ++k) {
    for (unsigned int n = 0; n < columns; ++n) {
      right[k * columns + n] = one.in_registers || one.wide != NONE_WIDE
                                   ? b.element(k, n, one.brain)
                                   : b.element(n, k, one.brain);
    }
  }
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    const unsigned int row = t / 32 * 16 + t % 32 / 4;
    const Product& own = issuers[first + static_cast<int>(t)].products[number];
    for (unsigned int x = 0; x < 8; ++x) {
      const unsigned int r = row + x / 2 % 2 * 8, k = t % 4 * 2 + x / 4 * 8 + x % 2;
      if (one.in_registers) {
        left[r * 16 + k] = widened(own.a[x / 2], x % 2, one.brain);
      } else {
        const SmemDesc a(what, where, one.a_described);
        left[r * 16 + k] =
            one.wide == BOTH_WIDE ? a.element(k, r, one.brain) : a.element(r, k, one.brain);
      }
    }
  }
  add_product(first, number, left, right, 16, 8);
}

// Gives the threads of a warpgroup what their groups but the last `pending` have made.
void finish_products(const char* what, Where where, unsigned int pending) {
  const int first = current() / static_cast<int>(WARPGROUP) * static_cast<int>(WARPGROUP);
  const Issuer& like = issuers[first];
  std::size_t done = 0;
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    const Issuer& issuer = issuers[first + static_cast<int>(t)];
    const bool same =
        std::equal(issuer.products.begin(), issuer.products.end(), like.products.begin(),
                   like.products.end(), [](const auto& x, const auto& y) { return x.is_like(y); });
    if (!same || issuer.groups != like.groups) {
      wrong(what, where, "begun were other products than by thread %d of the warpgroup", first);
    }
  }
  while (done < like.products.size() && like.products[done].group + pending < like.groups) ++done;
  for (std::size_t n = 0; n < done; ++n) {
    read_operands(what, where, like.products[n]);
    compute(what, where, first, n);
  }
  for (unsigned int t = 0; t < WARPGROUP; ++t) {
    Issuer& issuer = issuers[first + static_cast<int>(t)];
    issuer.products.erase(issuer.products.begin(),
                          issuer.products.begin() + static_cast<std::ptrdiff_t>(done));
    for (auto each = issuer.held.begin(); each != issuer.held.end();) {
      const auto& [d, values] = *each;
      const auto of = [&, d = d](const Product& product) { return product.d == d; };
      if (std::any_of(issuer.products.begin(), issuer.products.end(), of)) {
        ++each;
        continue;
      }
      for (std::size_t x = 0; x < values.size(); ++x) {
        unsigned int bits;
        std::memcpy(&bits, d + x, sizeof(bits));
        if (bits != UNTOUCHED) {
          wrong(what, where, "thread %d touched a result before it waited for its product",
                first + static_cast<int>(t));
        }
        d[x] = values[x];
      }
      each = issuer.held.erase(each);
    }
    issuer.fenced = false;
  }
}

}  // namespace

void mbarrier_init(const char* what, Where where, unsigned int address, int arrivals) {
  if (address % 8 || arrivals < 1) wrong(what, where, "address %u, %d arrivals", address, arrivals);
  const unsigned long long unknown = 0;
  races::access(shared_at(address), sizeof(unknown), true);
  std::memcpy(shared_at(address), &unknown, sizeof(unknown));
  barriers[address] = Barrier{};
  barriers[address].arrivals = barriers[address].missing = arrivals;
}

void mbarrier_inval(const char* what, Where where, unsigned int address) {
  barrier_at(what, where, address);
  races::access(shared_at(address), 8, true);
  barriers.erase(address);
}

void fence_mbarrier_init() {
  for (auto& each : barriers) each.second.published = true;
}

void arrive(const char* what, Where where, unsigned int address, int bytes) {
  Barrier& barrier = barrier_at(what, where, address);
  if (!barrier.missing) wrong(what, where, "once more than barrier %u counts", address);
  races::release(barrier.coming);
  --barrier.missing;
  barrier.bytes += bytes;
  barrier.end_phase();
}

void wait_phase(const char* what, Where where, unsigned int address, int parity) {
  Barrier& barrier = barrier_at(what, where, address);
  const auto over = [&barrier, parity] {
    return barrier.phase % 2 != static_cast<unsigned int>(parity);
  };
  if (!over()) turns::wait_until(what, where, over);
  races::acquire(barrier.over);
}

namespace {

// Comes to a barrier with a number; returns what it was voted, where it stays.
bool come_to(const char* what, Where where, int number, int threads, bool stays, bool votes,
             bool condition) {
  if (number < 0 || number > 15 || threads < 1 || threads % static_cast<int>(WARP) != 0) {
    wrong(what, where, "barrier %d, %d threads", number, threads);
  }
  Numbered& barrier = numbered[number];
  if (barrier.come == 0) {
    barrier.threads = threads;
    barrier.votes = votes;
    barrier.any = false;
  }
  if (barrier.threads != threads) {
    wrong(what, where, "barrier %d is one of %d threads, not %d", number, barrier.threads, threads);
  }
  if (barrier.votes != votes) wrong(what, where, "not all threads vote at barrier %d", number);
  barrier.any = barrier.any || condition;
  races::release(barrier.coming);
  const unsigned int times = barrier.times;
  if (++barrier.come == threads) {
    barrier.come = 0;
    barrier.over = barrier.coming;
    barrier.found = barrier.any;
    ++barrier.times;
  }
  if (!stays) return false;
  const auto over = [&barrier, times] { return barrier.times != times; };
  if (!over()) turns::wait_until(what, where, over);
  races::acquire(barrier.over);
  return barrier.found;
}

}  // namespace

void named_barrier_sync(const char* what, Where where, int number, int threads, bool stays) {
  come_to(what, where, number, threads, stays, false, false);
}

bool named_barrier_or(const char* what, Where where, int number, int threads, bool condition) {
  return come_to(what, where, number, threads, true, true, condition);
}

void fence_proxy_async() { races::publish(); }

void tma_load(const char* what, Where where, unsigned int to, const unsigned long long* words,
              unsigned int barrier, const int (&first)[5]) {
  Map map;
  std::memcpy(&map, words, sizeof(map));
  if (!barrier_at(what, where, barrier).published) {
    wrong(what, where, "barrier %u was not published", barrier);
  }
  if (to % 1024) wrong(what, where, "eight rows do not begin at %u", to);
  Transfer transfer = {to, std::vector<char>(map.rows * 128, 0), barrier, {}};
  map.visit_box(first, [&](unsigned int place, unsigned long long from) {
    if (from) std::memcpy(&transfer.bytes[place], reinterpret_cast<const void*>(from), 2);
  });
  transfer.begun = races::begin_transfer(shared_at(to), transfer.bytes.size());
  transfers.push_back(std::move(transfer));
  if (turns::at_once()) land(transfers.size() - 1);
}

namespace {

void begin(const char* what, Where where, const Product& made, const unsigned int* a) {
  Issuer& me = issuers[current()];
  if (!me.fenced) wrong(what, where, "no fence is behind what was done to registers");
  Product product = made;
  product.group = me.groups;
  if (a != nullptr) std::memcpy(product.a, a, sizeof(product.a));
  float* const d = product.d;
  const auto size = static_cast<std::size_t>(product.size());
  if (me.held.find(d) == me.held.end()) {
    me.held[d].assign(d, d + size);
    for (std::size_t x = 0; x < size; ++x) std::memcpy(d + x, &UNTOUCHED, sizeof(UNTOUCHED));
  }
  // What is read has come when the product begins: one thread of a warp asks for all.
  if (current() % static_cast<int>(WARP) == 0) read_operands(what, where, product);
  me.products.push_back(product);
}

}  // namespace

void begin_product(const char* what, Where where, float* d, int columns, const unsigned int* a,
                   unsigned long long a_described, unsigned long long b_described, bool add,
                   bool brain, Wide wide, Part part) {
  const bool floats = false;
  Product made = {0,      d,    columns, a != nullptr, add,        brain,
                  floats, wide, {},      a_described,  b_described};
  made.part = part;
  begin(what, where, made, a);
}

void begin_product_of_floats(const char* what, Where where, float* d, int columns,
                             const unsigned int* a, unsigned long long b_described, bool add) {
  const bool floats = true;
  const Product made = {0, d, columns, true, add, false, floats, NONE_WIDE, {}, 0, b_described};
  begin(what, where, made, a);
}

void begin_product_of_codes(const char* what, Where where, float* d, int columns,
                            const unsigned int* a, unsigned long long a_described,
                            unsigned long long b_described, bool add, Codes a_codes,
                            Codes b_codes) {
  Product made = {0,     d,         columns, a != nullptr, add,        false,
                  false, NONE_WIDE, {},      a_described,  b_described};
  made.a_codes = a_codes;
  made.b_codes = b_codes;
  begin(what, where, made, a);
}

void wgmma_fence() { issuers[current()].fenced = true; }

void wgmma_commit() { ++issuers[current()].groups; }

void wgmma_wait(const char* what, Where where, unsigned int pending) {
  turns::meet_warpgroup(what, where, [&] { finish_products(what, where, pending); });
}

namespace asynchronous {

void begin_block() {
  barriers.clear();
  numbered.clear();
  transfers.clear();
  issuers.clear();
  stores::begin_block();
}

bool proceed() {
  if (transfers.empty()) return false;
  land(turns::one_of(transfers.size()));
  return true;
}

void check_end() {
  if (!issuers[current()].products.empty()) fault(0, "ended before its products were finished");
  stores::check_end();
}

}  // namespace asynchronous
}  // namespace emulator
