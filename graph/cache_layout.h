// CacheLayout: where the tokens of a sequence lie in a cache, by their number alone. Kernels
// include it, so it includes nothing.
//
// A segment holds consecutive tokens. Token u behind the sinks goes to slot u mod (slots) of the
// quantized segment, which has a slot for each, or is a ring where a layer keeps only the last
// tokens. While the window has it, it is in slot u mod (slots of the window): that is a ring too.
#ifndef KVANT_GRAPH_CACHE_LAYOUT_H_
#define KVANT_GRAPH_CACHE_LAYOUT_H_

#ifdef __CUDACC__
#define KVANT_ANYWHERE __device__ __forceinline__
#else
#define KVANT_ANYWHERE inline
#endif

namespace kvant {

// What a sequence has of a segment: slots first, first + 1, ... (in a ring).
struct CacheRange {
  long long first = 0, tokens = 0;
};

struct CacheLayout {
  long long sinks = 0;     // slots, as are the next two
  long long main = 1;      // of the quantized segment
  long long window = 0;    // 0: there is none
  long long residual = 0;  // tokens that the window keeps
  long long bulk = 0;      // not 0: all leave the window at once, when one more comes
  long long keep = 0;      // only the last tokens of a sequence are of account; 0: all

  // Sinks where there are any, the quantized tokens, and the window likewise.
  KVANT_ANYWHERE int segments() const { return 1 + (sinks > 0 ? 1 : 0) + (residual > 0 ? 1 : 0); }
  // The most tokens that the window has. A token leaves when the next one comes. So a window that
  // slides has the newest token beside its `residual`, and one in bulk stays full until then.
  KVANT_ANYWHERE long long MostInWindow() const {
    return bulk != 0 || residual == 0 ? residual : residual + 1;
  }
  // Of a sequence's tokens, those behind the sinks.
  KVANT_ANYWHERE long long Behind(long long tokens) const {
    return tokens > sinks ? tokens - sinks : 0;
  }
  // How many of `behind` tokens, which are behind the sinks, are in the quantized segment.
  KVANT_ANYWHERE long long MainOf(long long behind) const {
    if (residual == 0 || behind == 0) return behind;
    const long long older = behind - 1;
    if (bulk != 0) return older / residual * residual;
    return older > residual ? older - residual : 0;
  }
  // The first token of account.
  KVANT_ANYWHERE long long First(long long tokens) const {
    return keep == 0 || tokens < keep ? 0 : tokens - keep;
  }
  // Of account, of a sequence of so many tokens.
  KVANT_ANYWHERE CacheRange Sinks(long long tokens) const {
    return RangeOf(sinks, First(tokens), tokens - Behind(tokens));
  }
  KVANT_ANYWHERE CacheRange Main(long long tokens) const {
    return RangeOf(main, Behind(First(tokens)), MainOf(Behind(tokens)));
  }
  KVANT_ANYWHERE CacheRange Window(long long tokens) const {
    const long long behind = Behind(tokens), left = MainOf(behind), first = Behind(First(tokens));
    return RangeOf(window, first > left ? first : left, behind);
  }

  // put(i, range) of each segment that there is, in the order in which attention reads them.
  template <class Put>
  KVANT_ANYWHERE void EachRange(long long tokens, Put put) const {
    int i = 0;
    if (sinks > 0) put(i++, Sinks(tokens));
    put(i++, Main(tokens));
    if (residual > 0) put(i, Window(tokens));
  }

  // Where the next `tokens` tokens of a sequence of `length` go, which lie in one segment without
  // a break. -1: nothing goes there.
  struct Places {
    int sinks = -1;
    int rest = -1;          // in the window, where there is one, or the quantized segment
    int leaving = -1;       // in the quantized segment, what leaves the window before they come
    int leaving_from = -1;  // in the window
  };
  KVANT_ANYWHERE Places PlacesOf(long long length, long long tokens) const {
    Places places;
    if (length < sinks) {
      places.sinks = static_cast<int>(length);
      return places;
    }
    const long long behind = length - sinks;
    places.rest = static_cast<int>(behind % (residual == 0 ? main : window));
    const long long left = MainOf(behind);
    if (residual == 0 || MainOf(behind + tokens) == left) return places;
    places.leaving = static_cast<int>(left % main);
    places.leaving_from = static_cast<int>(left % window);
    return places;
  }

 private:
  KVANT_ANYWHERE static CacheRange RangeOf(long long slots, long long from, long long to) {
    CacheRange range;
    if (from < to) {
      range.first = from % slots;
      range.tokens = to - from;
    }
    return range;
  }
};

}  // namespace kvant

#endif  // KVANT_GRAPH_CACHE_LAYOUT_H_
