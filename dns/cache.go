package dns

import (
	"container/list"
	"encoding/binary"
	"hash/maphash"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	cacheShards = 16
	// overhead is what an entry takes beside its bytes.
	overhead = 320
	staleFor = 30 // seconds: the TTL of an answer after its time, RFC 8767 section 4
)

// A reply is the checked answer of an upstream. It is not changed.
type reply struct {
	rcode    int
	wire     []byte   // the sections behind the question, compressed against it
	ttls     []uint16 // where in wire the TTLs are
	counts   [3]uint16
	negative bool // a no
	failed   bool // no answer: not asked again for a moment
	stripped bool // addresses were taken out, see Forwarder.PrivateZones

	stored  time.Time
	expires time.Time
}

func (e *reply) size(key string) int { return overhead + len(key) + len(e.wire) + 2*len(e.ttls) }

// paste writes a reply's records with the TTLs they have left. Names of
// wire point into the question by its place, whatever its case.
func (w *writer) paste(e *reply, age uint32, stale bool) bool {
	start := len(w.b)
	if start+len(e.wire)+w.spare > w.limit {
		return false
	}
	w.b = append(w.b, e.wire...)
	for _, at := range e.ttls {
		p := w.b[start+int(at):]
		ttl := uint32(staleFor)
		if !stale {
			ttl = binary.BigEndian.Uint32(p)
			ttl -= min(age, ttl)
		}
		binary.BigEndian.PutUint32(p, ttl)
	}
	w.counts = e.counts
	return true
}

// A cache holds entries, the last used ones, by bytes.
type cache struct {
	seed   maphash.Seed
	shards [cacheShards]cacheShard
}

type cacheShard struct {
	mu    sync.Mutex // guards what follows
	limit int
	used  int
	by    map[string]*list.Element // of *cacheItem
	order list.List                // the last used in front
}

type cacheItem struct {
	key   string
	reply *reply
	retry time.Time // before it, an old entry is served without asking
}

func newCache(limit int) *cache {
	c := &cache{seed: maphash.MakeSeed()}
	for i := range c.shards {
		c.shards[i].limit = limit / cacheShards
		c.shards[i].by = map[string]*list.Element{}
	}
	return c
}

func (c *cache) shard(key []byte) *cacheShard {
	return &c.shards[maphash.Bytes(c.seed, key)%cacheShards]
}

// get returns the entry for key, and until when it may be served stale without asking.
func (c *cache) get(key []byte) (e *reply, retry time.Time) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	el := s.by[string(key)]
	if el == nil {
		return nil, time.Time{}
	}
	s.order.MoveToFront(el)
	item := el.Value.(*cacheItem)
	return item.reply, item.retry
}

// put stores e for key, and evicts the entries that were used least recently.
func (c *cache) put(key []byte, e *reply) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if el := s.by[string(key)]; el != nil {
		s.remove(el)
	}
	item := &cacheItem{key: string(key), reply: e}
	if s.used += e.size(item.key); s.used > s.limit && s.order.Len() == 0 {
		s.used = 0 // larger than all there is
		return
	}
	s.by[item.key] = s.order.PushFront(item)
	for s.used > s.limit {
		s.remove(s.order.Back())
	}
}

// retryAt notes that key's entry, which is stale, is not renewed before retry.
func (c *cache) retryAt(key []byte, retry time.Time) {
	s := c.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if el := s.by[string(key)]; el != nil {
		el.Value.(*cacheItem).retry = retry
	}
}

func (s *cacheShard) remove(el *list.Element) {
	item := s.order.Remove(el).(*cacheItem)
	delete(s.by, item.key)
	s.used -= item.reply.size(item.key)
}

// bytes returns the bytes that all entries take.
func (c *cache) bytes() (n int) {
	for i := range c.shards {
		c.shards[i].mu.Lock()
		n += c.shards[i].used
		c.shards[i].mu.Unlock()
	}
	return n
}

// appendKey makes the key of a question: what its answer depends on.
func appendKey(b []byte, q *query) []byte {
	b = binary.BigEndian.AppendUint16(b, q.qtype)
	flags := byte(0)
	if q.do {
		flags |= 1
	}
	if q.flags&bitCD != 0 {
		flags |= 2
	}
	b = append(b, flags)
	return append(b, q.name...)
}

// newReply packs an answer that has been checked. It returns nil for one that cannot
// be packed so that it can be read, or that does not fit into a message: clients do
// not get messages that were made to break them.
func newReply(m *dns.Msg, questionLen int) *reply {
	m.Compress = true
	b, err := m.Pack()
	if err != nil || len(b) > maxMessage-64 || len(b) < headerLen+questionLen {
		return nil
	}
	if new(dns.Msg).Unpack(b) != nil {
		return nil
	}
	e := &reply{rcode: m.Rcode, counts: [3]uint16{uint16(len(m.Answer)), uint16(len(m.Ns)), uint16(len(m.Extra))}}
	off := headerLen + questionLen
	e.wire = b[off:]
	for range len(m.Answer) + len(m.Ns) + len(m.Extra) {
		end, ok := skipName(b, off)
		if !ok || end+10 > len(b) {
			return nil
		}
		e.ttls = append(e.ttls, uint16(end+4-headerLen-questionLen))
		off = end + 10 + int(binary.BigEndian.Uint16(b[end+8:]))
	}
	if off != len(b) {
		return nil
	}
	return e
}
