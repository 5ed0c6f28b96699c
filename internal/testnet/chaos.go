package testnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// A Dial opens a stream and returns both its ends. The caller closes them.
type Dial func(ctx context.Context) (client, server net.Conn, err error)

// A Side is an end of a stream.
type Side int

// The two ends, and no end.
const (
	Neither Side = iota
	ClientSide
	ServerSide
)

func (s Side) String() string { return [...]string{"neither", "client", "server"}[s] }

// A Plan says what a run of the chaos pair does. The Seed determines the
// bytes, the size of every chunk and every stall.
type Plan struct {
	Seed     uint64
	Up, Down int64 // bytes from client to server and back

	MaxChunk int           // bytes of a write or read; 0 means 1 MiB
	Stalls   int           // of a thousand chunks, so many come after a pause of at most 2 ms
	Timeout  time.Duration // of the whole run; 0 means a minute

	Abort      Side  // the side that aborts instead of ending its direction
	AbortAfter int64 // bytes it has written by then; at most all of them
}

// Random makes a plan of a seed: sizes up to most bytes each way, and an abort
// in half of all cases.
func Random(seed uint64, most int64) Plan {
	r := rand.New(rand.NewPCG(seed, 1))
	p := Plan{Seed: seed, Up: size(r, most), Down: size(r, most), Stalls: r.IntN(50)}
	p.MaxChunk = int(size(r, 1<<20))
	// Tiny chunks for large streams take long and show nothing more.
	p.MaxChunk = max(p.MaxChunk, int((p.Up+p.Down)/200), 1)
	switch r.IntN(4) {
	case 0:
		p.Abort, p.AbortAfter = ClientSide, r.Int64N(p.Up+1)
	case 1:
		p.Abort, p.AbortAfter = ServerSide, r.Int64N(p.Down+1)
	}
	return p
}

// size returns a number from 1 to most, every order of magnitude as likely as
// the others.
func size(r *rand.Rand, most int64) int64 {
	n := int64(1) << r.IntN(bits.Len64(uint64(most)))
	return min(n+r.Int64N(n), most)
}

// A Result says what arrived.
type Result struct {
	Up, Down             int64 // bytes that arrived, all checked
	ClientSaw, ServerSaw error // how each side's reading ended, io.EOF for an end of stream
}

// Run opens a stream and drives both ends as p says, both directions at once.
// Every byte that arrives must be the right one. Without an abort everything
// arrives and then the end of the stream; with one, the other side gets an
// exact prefix and then an error, and not the end of the stream.
//
// Failures go to t.Errorf with the plan, so a run can be repeated, and Run may
// be called on any goroutine. It returns when both ends are closed.
func Run(ctx context.Context, t testing.TB, dial Dial, p Plan) Result {
	t.Helper()
	if p.Timeout == 0 {
		p.Timeout = time.Minute
	}
	if p.MaxChunk == 0 {
		p.MaxChunk = 1 << 20
	}
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	c, s, err := dial(ctx)
	if err != nil {
		t.Errorf("chaos %+v: dial: %v", p, err)
		return Result{}
	}
	up, down := Stream(p.Seed*2+1), Stream(^(p.Seed*2 + 1))
	client := &end{side: ClientSide, conn: c, out: up, outSize: p.Up, in: down, inSize: p.Down, plan: &p}
	server := &end{side: ServerSide, conn: s, out: down, outSize: p.Down, in: up, inSize: p.Up, plan: &p}

	// A failure on one side would leave the other waiting.
	stop := context.AfterFunc(ctx, func() {
		_ = c.Close()
		_ = s.Close()
	})
	var wg sync.WaitGroup
	for _, e := range []*end{client, server} {
		wg.Go(func() { e.writeErr = e.write(ctx); e.fail(cancel, e.writeErr) })
		wg.Go(func() { e.readErr = e.read(ctx); e.fail(cancel, e.readErr) })
	}
	wg.Wait()
	timedOut := errors.Is(ctx.Err(), context.DeadlineExceeded)
	stop()
	_ = c.Close()
	_ = s.Close()

	r := Result{Up: server.got.Load(), Down: client.got.Load(), ClientSaw: client.readErr, ServerSaw: server.readErr}
	if timedOut {
		t.Errorf("chaos %+v: not done after %v: the client sent %d and got %d, the server sent %d and got %d bytes",
			p, p.Timeout, client.sent.Load(), r.Down, server.sent.Load(), r.Up)
		return r
	}
	for _, e := range []*end{client, server} {
		if err := e.judge(); err != nil {
			t.Errorf("chaos %+v: %s: %v", p, e.side, err)
		}
	}
	return r
}

// An end is one end of the stream, driven by a goroutine that writes and one
// that reads.
type end struct {
	side            Side
	conn            net.Conn
	out, in         Stream
	outSize, inSize int64
	plan            *Plan

	sent, got         atomic.Int64
	writeErr, readErr error
}

// errWrong marks what is wrong whatever the plan was.
var errWrong = errors.New("wrong bytes")

func (e *end) fail(cancel func(), err error) {
	if errors.Is(err, errWrong) || e.plan.Abort == Neither && err != nil && err != io.EOF {
		cancel()
	}
}

// write sends the direction and ends it, or aborts in the middle.
func (e *end) write(ctx context.Context) error {
	r := rand.New(rand.NewPCG(e.plan.Seed, uint64(10+e.side)))
	buf := make([]byte, min(int64(e.plan.MaxChunk), max(e.outSize, 1)))
	upTo := e.outSize
	if e.plan.Abort == e.side {
		upTo = min(e.plan.AbortAfter, upTo)
	}
	for off := int64(0); off < upTo; {
		chunk := buf[:min(size(r, int64(len(buf))), upTo-off)]
		e.stall(ctx, r)
		e.out.Fill(chunk, off)
		n, err := e.conn.Write(chunk)
		off += int64(n)
		e.sent.Store(off)
		if err != nil {
			return err
		}
	}
	e.stall(ctx, r)
	if e.plan.Abort == e.side {
		_ = Abort(e.conn)
		return nil
	}
	return CloseWrite(e.conn)
}

// read takes what comes and checks it. It returns io.EOF at the end.
func (e *end) read(ctx context.Context) error {
	r := rand.New(rand.NewPCG(e.plan.Seed, uint64(20+e.side)))
	buf := make([]byte, e.plan.MaxChunk)
	for off := int64(0); ; {
		e.stall(ctx, r)
		n, err := e.conn.Read(buf[:size(r, int64(len(buf)))])
		if off+int64(n) > e.inSize {
			return fmt.Errorf("%w: %d more than the %d that were sent", errWrong, off+int64(n)-e.inSize, e.inSize)
		}
		if cerr := e.in.Check(buf[:n], off); cerr != nil {
			return fmt.Errorf("%w at %v", errWrong, cerr)
		}
		off += int64(n)
		e.got.Store(off)
		if err != nil {
			return err
		}
	}
}

func (e *end) stall(ctx context.Context, r *rand.Rand) {
	if r.IntN(1000) >= e.plan.Stalls {
		return
	}
	t := time.NewTimer(time.Duration(r.Int64N(int64(2 * time.Millisecond))))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// judge says what is wrong with how this end's run ended.
func (e *end) judge() error {
	switch {
	case errors.Is(e.readErr, errWrong):
		return e.readErr
	case e.plan.Abort == e.side:
		return nil // it got an exact prefix, which is all it can ask
	case e.plan.Abort == Neither:
		switch {
		case e.writeErr != nil:
			return fmt.Errorf("write after %d of %d bytes: %w", e.sent.Load(), e.outSize, e.writeErr)
		case e.readErr != io.EOF:
			return fmt.Errorf("read after %d of %d bytes: %w", e.got.Load(), e.inSize, e.readErr)
		case e.got.Load() != e.inSize:
			return fmt.Errorf("the stream ended after %d of %d bytes", e.got.Load(), e.inSize)
		}
		return nil
	case e.readErr == io.EOF && !errors.Is(e.writeErr, syscall.ECONNRESET):
		// The kernel tells of a reset once, to a read or a write, and says end
		// of stream after that. After a FIN it would have told the write EPIPE
		// instead, so this is exact.
		return fmt.Errorf("the aborted stream looks whole: end of stream after %d bytes, want an error", e.got.Load())
	}
	return nil
}

// CloseWrite ends c's direction. It is an error if c can't.
func CloseWrite(c net.Conn) error {
	w, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return fmt.Errorf("testnet: a %T has no CloseWrite", c)
	}
	return w.CloseWrite()
}

// Abort closes c so that its peer can tell, where c has a way: by a method
// Abort, or as TCP by a reset.
func Abort(c net.Conn) error {
	switch c := c.(type) {
	case interface{ Abort() error }:
		return c.Abort()
	case interface{ SetLinger(int) error }:
		_ = c.SetLinger(0)
	}
	return c.Close()
}
