package gateway

import (
	"context"
	"log/slog"
	"runtime"
	"runtime/metrics"
	"sync/atomic"
	"time"

	"culvert.dev/connect/h3"
	"culvert.dev/tunnel"
)

// What of the memory may be used before connections are refused, and before
// none is accepted, in percent. A state is left five points below where it is
// entered.
const (
	shortAt = 85
	fullAt  = 95
	calmer  = 5
)

const (
	lookEvery = 250 * time.Millisecond
	lookFull  = 50 * time.Millisecond // while memory is full

	// And sooner, where as many descriptors were taken as may come to use up
	// crowdShare percent of the limit: a crowd that comes at once must find out
	// that memory is short before it is full.
	crowdShare = 5
	costly     = 32 << 10 // bytes that one may come to cost: a buffer, a goroutine and what they belong to

	// The runtime is asked to collect garbage where memory seems short: once a
	// second, or sooner where that takes one part in so many of the time.
	collectEvery = time.Second
	collectPart  = 10

	// relievePart is which part of the time may be spent on finding tunnels to end.
	relievePart = 10

	// backlogShare of the limit may be held by tunnels whose other side does
	// not take what was read.
	backlogShare = 4
)

// A memoryWatch tells the budget how short of memory the process is. There are
// up to two limits: the Go runtime's, on what it has mapped, and the cgroup's,
// beyond which the kernel kills, on that and on what the kernel holds for us.
//
// Garbage is not counted: it is there to be collected, and the runtime lets it
// grow to its limit.
type memoryWatch struct {
	limit  int64   // of the runtime; 0 for none
	group  *cgroup // nil for none
	budget *tunnel.Budget
	log    *slog.Logger

	set   func(int64) // moves limit; nil if it must stay
	space spacing

	changed chan struct{} // receives when wanted is another limit
	wanted  atomic.Int64  // as Config.Memory
	asked   int64         // the last one that was wanted and is used

	// relieve ends tunnels that keep about n bytes, of the kernel's too where
	// those count; nil for nothing.
	relieve  func(n int64, kernel bool) tunnel.FreedMemory
	http3    func() []*h3.Server // those that serve; nil for none
	relieved time.Time           // when it was last called,
	hunting  time.Duration       // and how long it took

	used      atomic.Int64 // of the limit that is nearer, for the metrics
	of        atomic.Int64
	sockets   bool  // of is of a cgroup that counts the kernel's memory for sockets
	others    int64 // what the cgroup holds beside what the runtime has mapped
	moved     int64 // where set was told to move limit
	collected time.Time
	took      time.Duration // by the last collection
}

// AutoMemory returns what the Go runtime should keep below in the cgroup of
// this process, in bytes: nine tenths of its limit, since the kernel holds
// something for us, too. 0 means that there is no limit.
func AutoMemory() int64 {
	g := ownCgroup()
	if g == nil {
		return 0
	}
	if _, limit, ok := g.read(); ok {
		return limit / 10 * 9
	}
	return 0
}

// watchMemory prepares the watch, which Run runs.
func (g *Gateway) watchMemory(budget *tunnel.Budget) {
	w := &g.memory
	w.limit, w.set, w.budget, w.log = g.cfg.Memory, g.cfg.SetMemory, budget, g.log
	w.space.set, w.space.collect = g.cfg.SetGCPercent, runtime.GC
	w.relieve = g.relay.FreeMemory
	w.http3 = g.http3.servers
	w.changed = make(chan struct{}, 1)
	w.begin(g.cfg.Memory)
}

// begin makes limit, as Config.Memory, what is kept below.
func (w *memoryWatch) begin(limit int64) {
	w.asked, w.limit, w.moved, w.group = limit, limit, limit, nil
	w.used.Store(0)
	w.of.Store(0)
	if limit >= 0 {
		w.group = ownCgroup()
		w.measure()
	}
	w.budget.SetBacklogs(w.of.Load() / backlogShare)
}

// change has the watch keep below another limit, as Config.Memory, in its own time.
func (w *memoryWatch) change(limit int64) {
	w.wanted.Store(limit)
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// use takes up a limit that was changed, unless the runtime's must stay.
func (w *memoryWatch) use(limit int64) {
	if limit == w.asked || w.set == nil {
		return
	}
	w.set(limit)
	w.begin(limit)
	if w.limit <= 0 && w.group == nil {
		w.budget.SetPressure(tunnel.Calm)
	}
	w.log.Info("memory limit changed", "limit", w.of.Load())
}

// next returns the state that follows was when used bytes of limit are in use.
func next(was tunnel.Pressure, used, limit int64) tunnel.Pressure {
	at := func(percent int64) bool { return used >= limit/100*percent }
	switch {
	case at(fullAt), was == tunnel.Full && at(fullAt-calmer):
		return tunnel.Full
	case at(shortAt), was != tunnel.Calm && at(shortAt-calmer):
		return tunnel.Short
	}
	return tunnel.Calm
}

// run looks at the memory until ctx is done.
func (w *memoryWatch) run(ctx context.Context) error {
	timer := time.NewTimer(lookEvery)
	defer timer.Stop()
	defer w.space.end()
	for {
		w.spaceOut()
		if w.limit <= 0 && w.group == nil {
			w.space.schedule(timer)
			select {
			case <-ctx.Done():
				return nil
			case <-w.changed:
				w.use(w.wanted.Load())
			case <-timer.C:
			}
			continue
		}
		w.look(ctx)
		if w.budget.Pressure() == tunnel.Full {
			timer.Reset(lookFull)
		} else {
			timer.Reset(lookEvery)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-w.changed:
			w.use(w.wanted.Load())
		case <-timer.C:
		case <-w.budget.NotifyAt(crowd(w.of.Load())):
		}
	}
}

// spaceOut has collections at the distance that the memory allows.
func (w *memoryWatch) spaceOut() {
	if w.space.set != nil {
		w.space.look(time.Now(), readHeap(), w.used.Load(), w.of.Load(), w.budget.Pressure() != tunnel.Calm)
	}
}

// crowd is how many descriptors may be taken before the next look.
func crowd(limit int64) int64 { return max(limit/100*crowdShare/costly, 1) }

func (w *memoryWatch) look(ctx context.Context) {
	garbage := w.measure()
	was := w.budget.Pressure()
	used, of := w.used.Load(), w.of.Load()
	// What was allocated since the last collection may be in use or not: where
	// that would decide, it is found out. And while memory is short, those who
	// held it may be gone: their stacks go with a collection, what they left in
	// pools with two.
	unsure := next(was, used, of) == tunnel.Calm && next(was, used+garbage, of) != tunnel.Calm
	idle := time.Since(w.collected)
	if cheap := idle >= collectPart*w.took; unsure && (cheap || idle >= collectEvery) || was != tunnel.Calm && cheap {
		begin := time.Now()
		runtime.GC()
		w.collected = time.Now()
		w.took = w.collected.Sub(begin)
		w.measure()
		used, of = w.used.Load(), w.of.Load()
	}
	is := next(was, used, of)
	if is != was {
		w.say(ctx, is, used, of)
	}
	if is == tunnel.Full {
		w.free(ctx, used-of/100*(fullAt-calmer))
	}
}

// say tells the budget and the log of a new state.
func (w *memoryWatch) say(ctx context.Context, is tunnel.Pressure, used, of int64) {
	w.budget.SetPressure(is)
	level := slog.LevelWarn
	if is == tunnel.Calm {
		level = slog.LevelInfo
	}
	w.log.Log(ctx, level, "memory is "+is.String(), "used", used, "limit", of)
}

// free makes room for n bytes at the cost of those who hold most, so that memory
// does not stay full for as long as they like.
func (w *memoryWatch) free(ctx context.Context, n int64) {
	if w.relieve == nil || time.Since(w.relieved) < relievePart*w.hunting {
		return
	}
	if !w.relieved.IsZero() && w.collected.Before(w.relieved) {
		return // what was freed last is not known yet
	}
	begin := time.Now()
	did := w.relieve(n, w.sockets)
	if did.Ended == 0 && !did.Late && w.http3 != nil {
		w.endUnread(ctx)
	}
	w.relieved = time.Now()
	w.hunting = w.relieved.Sub(begin)
	if did.Ended > 0 {
		w.log.LogAttrs(ctx, slog.LevelWarn, "memory is full; aborted stalled tunnels", slog.Int("tunnels", did.Ended), slog.Int64("bytes", did.Freed), slog.String("client", did.Client))
	}
}

// endUnread ends a connection of HTTP/3: what one keeps out of order is seen of no
// tunnel.
func (w *memoryWatch) endUnread(ctx context.Context) {
	var most h3.Unread
	for _, s := range w.http3() {
		if u := s.MostUnread(); u.Bytes > most.Bytes {
			most = u
		}
	}
	if most.Bytes > 0 {
		most.End()
		w.log.LogAttrs(ctx, slog.LevelWarn, "memory is full; closed the HTTP/3 connection with most unread bytes", slog.Int64("bytes", most.Bytes), slog.String("client", most.Client))
	}
}

// measure sets used and of, and returns how much may be garbage beyond that.
func (w *memoryWatch) measure() (garbage int64) {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(samples)
	get := func(i int) int64 {
		if samples[i].Value.Kind() != metrics.KindUint64 {
			return 0
		}
		return int64(samples[i].Value.Uint64())
	}
	garbage = max(get(3)-get(4), 0)
	spare := garbage + get(2) // and free pages, which the runtime gives back when it must
	mapped := get(0) - get(1)
	w.sockets = false
	used, of := mapped-spare, w.limit
	if held, limit, ok := w.group.read(); ok {
		w.others = max(held-mapped, 0)
		w.move(limit)
		if of <= 0 || float64(held-spare)/float64(limit) > float64(used)/float64(of) {
			used, of = held-spare, limit
			w.sockets = w.group.sockets()
		}
	}
	w.used.Store(max(used, 0))
	w.of.Store(of)
	return garbage
}

// move keeps the runtime's limit as far below the cgroup's as what others hold
// there: the kernel for our sockets, most of all. It leaves it a quarter, or it
// would do nothing but collect.
func (w *memoryWatch) move(group int64) {
	if w.set == nil || w.limit <= 0 {
		return
	}
	to := min(w.limit, max(group/10*9-w.others, w.limit/4))
	if d := to - w.moved; d > w.limit/50 || d < -w.limit/50 {
		w.set(to)
		w.moved = to
	}
}
