package admin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	batchDelay = 100 * time.Millisecond // between two writes
	batchSize  = 64 << 10               // bytes that are written without waiting for that
)

// DefaultQueue is how many bytes of an AsyncWriter may wait.
const DefaultQueue = 1 << 20

// An AsyncWriter takes lines and passes them on from a goroutine of its own,
// so that a pipe nobody reads, a terminal on hold or a full disk stops the log
// and nothing else. Lines that find no room are dropped and counted, and once
// the reader is back one line says how many, at the place of the gap.
//
// The first line after a pause goes out at once. Those that follow it gather
// for batchDelay: to wake the goroutine for each line costs many times what the
// line does.
//
// Lines come one in each Write, as log/slog's handlers write them. Make one
// with NewAsyncWriter, and Close it.
type AsyncWriter struct {
	// Queue is how many bytes may wait; as many again may be on their way. 0
	// means DefaultQueue. Set it before the first Write.
	Queue int

	sink    io.Writer
	dropped atomic.Uint64
	wake    chan struct{} // holds one; something changed
	done    chan struct{} // closed when the goroutine has ended

	mu     sync.Mutex // guards what follows; held for a copy, never for I/O
	lines  []byte     // waiting
	missed uint64     // lines dropped since lines was last taken
	closed bool
	idle   bool // the goroutine waits for the first line
}

// NewAsyncWriter starts an AsyncWriter in front of sink, which it does not
// close.
func NewAsyncWriter(sink io.Writer) *AsyncWriter {
	w := &AsyncWriter{sink: sink, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go w.run()
	return w
}

// Write queues a copy of line, or drops it. It never waits and reports no
// error but os.ErrClosed, after Close.
func (w *AsyncWriter) Write(line []byte) (int, error) {
	queue := w.Queue
	if queue == 0 {
		queue = DefaultQueue
	}
	w.mu.Lock()
	switch {
	case w.closed:
		w.mu.Unlock()
		w.dropped.Add(count(line))
		return 0, os.ErrClosed
	case w.missed > 0 || len(w.lines)+len(line) > queue:
		// Once a line is missed so are the next, until the queue is taken: a
		// short one that still fits would stand before the gap, not after it.
		w.missed += count(line)
		w.mu.Unlock()
		w.dropped.Add(count(line))
		w.signal()
	default:
		before := len(w.lines)
		w.lines = append(w.lines, line...)
		wake := w.idle || before < batchSize && len(w.lines) >= batchSize
		w.idle = false
		w.mu.Unlock()
		if wake {
			w.signal()
		}
	}
	return len(line), nil
}

// Flush has the lines that wait passed on now. It does not wait for that.
func (w *AsyncWriter) Flush() { w.signal() }

// Dropped returns how many lines were dropped or could not be written, since
// the start.
func (w *AsyncWriter) Dropped() uint64 { return w.dropped.Load() }

// Close passes on what waits and ends the goroutine. If ctx ends first, Close
// returns its error, and the goroutine ends when the sink lets go of it. A
// second Close waits like the first.
func (w *AsyncWriter) Close(ctx context.Context) error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.signal()
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("flush the log: %w", ctx.Err())
	}
}

func (w *AsyncWriter) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// keep is the size up to which a buffer is used again.
const keep = 2 * batchSize

// run passes lines on until Close.
func (w *AsyncWriter) run() {
	defer close(w.done)
	out := output{sink: w.sink}
	delay := time.NewTimer(0)
	defer delay.Stop()
	var spare []byte
	for {
		w.mu.Lock()
		lines, missed, closed := w.lines, w.missed, w.closed
		nothing := len(lines) == 0 && missed == 0 && !closed
		w.idle = nothing
		if !nothing {
			w.lines, w.missed = spare[:0], 0
		}
		w.mu.Unlock()
		if nothing {
			<-w.wake
			continue
		}

		w.dropped.Add(out.write(lines))
		out.gap += missed
		out.notice()

		spare = nil
		if cap(lines) <= keep {
			spare = lines
		}
		if closed {
			return
		}
		delay.Reset(batchDelay)
		select {
		case <-delay.C:
		case <-w.wake:
		}
	}
}

// output writes batches of lines and says where some are missing.
type output struct {
	sink io.Writer
	gap  uint64 // lines missing at this place
	torn bool   // the last line went out in part
	json bool   // the lines are JSON
	down bool   // the last write failed
}

// write passes on lines. It returns how many could not be written, which are
// added to the gap.
func (o *output) write(lines []byte) (lost uint64) {
	if len(lines) == 0 {
		return 0
	}
	o.json = lines[0] == '{'
	o.down = false
	o.notice()
	n := 0
	if !o.down {
		n = o.put(lines)
	}
	lost = count(lines[n:])
	o.gap += lost
	return lost
}

// notice says how large the gap is, and closes it if that worked. With a sink
// that is down it waits for the next line.
func (o *output) notice() {
	if o.gap == 0 || o.down {
		return
	}
	var b bytes.Buffer
	if o.torn {
		b.WriteByte('\n')
	}
	var h slog.Handler = slog.NewTextHandler(&b, nil)
	if o.json {
		h = slog.NewJSONHandler(&b, nil)
	}
	slog.New(h).Warn("log lines dropped: the log is not read, or cannot be written", "dropped", o.gap)
	if o.put(b.Bytes()); !o.down {
		o.gap = 0
	}
}

// put writes p and returns how much of it went out.
func (o *output) put(p []byte) int {
	n, err := o.sink.Write(p)
	n = min(max(n, 0), len(p))
	o.down = err != nil || n < len(p)
	if n > 0 {
		o.torn = p[n-1] != '\n'
	}
	return n
}

// count returns how many lines p is.
func count(p []byte) uint64 {
	n := bytes.Count(p, []byte{'\n'})
	if len(p) > 0 && p[len(p)-1] != '\n' {
		n++
	}
	return uint64(n)
}
