package admin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A gate is a sink that is stuck until it is opened.
type gate struct {
	buffer
	open    chan struct{}
	entered chan struct{} // gets a value for each Write that waits
}

func newGate() *gate {
	return &gate{open: make(chan struct{}), entered: make(chan struct{}, 1000)}
}

func (g *gate) Write(p []byte) (int, error) {
	g.entered <- struct{}{}
	<-g.open
	return g.buffer.Write(p)
}

func closeWriter(t *testing.T, w *AsyncWriter) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := w.Close(ctx); err != nil {
		t.Fatalf("Close: %v", err)
	}
}

func TestAsyncWriterKeepsOrder(t *testing.T) {
	var out buffer
	w := NewAsyncWriter(&out)
	var want strings.Builder
	for i := range 5000 {
		line := fmt.Sprintf("line %d\n", i)
		want.WriteString(line)
		if n, err := w.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	closeWriter(t, w)
	if out.String() != want.String() {
		t.Errorf("got %d bytes, want %d, or in another order", len(out.String()), want.Len())
	}
	if w.Dropped() != 0 {
		t.Errorf("Dropped = %d, want 0", w.Dropped())
	}
	closeWriter(t, w) // again
	if _, err := w.Write([]byte("late\n")); !errors.Is(err, os.ErrClosed) || w.Dropped() != 1 {
		t.Errorf("Write after Close: %v, %d dropped, want %v and 1", err, w.Dropped(), os.ErrClosed)
	}
}

var droppedLine = regexp.MustCompile(`msg="log lines dropped: [^"]*" dropped=(\d+)\n`)

// N33: a sink that is stuck holds up nobody, and the log says what is missing
// and where.
func TestAsyncWriterStuckSink(t *testing.T) {
	g := newGate()
	w := NewAsyncWriter(g)
	w.Queue = 4 << 10
	access := &AccessLog{Log: slog.New(slog.NewTextHandler(w, nil))}
	write := func(s string) { _, _ = io.WriteString(w, s+"\n") }
	write("first")
	<-g.entered // on its way, and stuck
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range 2000 {
			access.Observe(carried())
		}
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("Observe waits for the log's reader")
	}
	if w.Dropped() == 0 {
		t.Fatal("a queue of 4 KiB took 2,000 lines")
	}
	held := 2000 - int(w.Dropped())
	if held < 5 || held > 40 {
		t.Errorf("%d lines are held in 4 KiB", held)
	}
	close(g.open)
	for deadline := time.Now().Add(10 * time.Second); !droppedLine.MatchString(g.String()); {
		if time.Now().After(deadline) {
			t.Fatalf("no line about the gap:\n%s", g.String())
		}
		time.Sleep(time.Millisecond)
	}
	write("after")
	closeWriter(t, w)

	out := g.String()
	if got := droppedLine.FindAllStringSubmatch(out, -1); len(got) != 1 || got[0][1] != strconv.FormatUint(w.Dropped(), 10) {
		t.Errorf("the gap is said as %q, want once, %d", got, w.Dropped())
	}
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 1+held+2 || lines[0] != "first" || !strings.Contains(lines[1+held], "log lines dropped") || lines[2+held] != "after" {
		t.Errorf("want first, %d lines, the gap, after; got %d lines:\n%s", held, len(lines), out)
	}
}

func TestAsyncWriterQueueLimit(t *testing.T) {
	g := newGate()
	w := NewAsyncWriter(g)
	w.Queue = 10
	_, _ = io.WriteString(w, "x\n")
	<-g.entered
	_, _ = io.WriteString(w, "12345678\n") // 9
	if w.Dropped() != 0 {
		t.Error("a line within the limit is dropped")
	}
	_, _ = io.WriteString(w, "9\n")
	if w.Dropped() != 1 {
		t.Errorf("a line over the limit: Dropped = %d, want 1", w.Dropped())
	}
	_, _ = io.WriteString(w, "\n") // would fit, but in the wrong place
	if w.Dropped() != 2 {
		t.Errorf("a line after the gap: Dropped = %d, want 2", w.Dropped())
	}
	close(g.open)
	closeWriter(t, w)
	if got := g.String(); !strings.HasPrefix(got, "x\n12345678\n") || !strings.HasSuffix(got, " dropped=2\n") {
		t.Errorf("got %q, want x, 12345678 and a line that ends in dropped=2", got)
	}
}

func TestAsyncWriterSaysItInJSON(t *testing.T) {
	g := newGate()
	w := NewAsyncWriter(g)
	w.Queue = 20
	log := slog.New(slog.NewJSONHandler(w, nil))
	_, _ = io.WriteString(w, "{\"a\":1}\n")
	<-g.entered
	log.Info("longer than twenty bytes")
	close(g.open)
	closeWriter(t, w)
	if got := g.String(); !regexp.MustCompile(`^\{"a":1\}\n\{.*"msg":"log lines dropped.*","dropped":1\}\n$`).MatchString(got) {
		t.Errorf("got %q, want the line and one about 1 dropped line", got)
	}
}

// A full disk: some lines are lost, one of them half written.
type disk struct {
	buffer
	mu   sync.Mutex
	room int
}

func (d *disk) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := min(d.room, len(p))
	d.room -= n
	_, _ = d.buffer.Write(p[:n])
	if n < len(p) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func TestAsyncWriterFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{room: 8}
		w := NewAsyncWriter(d)
		line := func(s string) {
			_, _ = io.WriteString(w, s+"\n")
			time.Sleep(batchDelay) // of the bubble
			synctest.Wait()
		}
		line("one")
		line("twotwo") // the disk has room for four of seven bytes
		line("three")
		if w.Dropped() != 2 {
			t.Errorf("Dropped = %d, want 2", w.Dropped())
		}
		d.mu.Lock()
		d.room = 1 << 20
		d.mu.Unlock()
		line("four")
		line("five")
		closeWriter(t, w)
		got := regexp.MustCompile(`time=.* level=WARN msg="log lines dropped[^"]*"`).ReplaceAllString(d.String(), "GAP")
		if want := "one\ntwot\nGAP dropped=2\nfour\nfive\n"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// A line after a pause goes out at once, those that follow gather, and a full
// batch does not wait.
func TestAsyncWriterBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out writes
		w := NewAsyncWriter(&out)
		write := func(size int) {
			_, _ = w.Write(append(bytes.Repeat([]byte("x"), size-1), '\n'))
			synctest.Wait()
		}
		check := func(when string, want ...int) {
			t.Helper()
			if got := out.take(); !slices.Equal(got, want) {
				t.Errorf("%s: writes of %d bytes, want %d", when, got, want)
			}
		}
		write(10)
		check("the first line", 10)
		for range 100 {
			write(10)
		}
		check("100 more, at once")
		time.Sleep(batchDelay)
		synctest.Wait()
		check("after the delay", 1000)
		write(batchSize)
		check("a full batch", batchSize)
		write(10)
		check("after it")
		time.Sleep(2 * batchDelay)
		synctest.Wait()
		check("after the delay", 10)
		write(10)
		check("after a pause", 10)
		write(10)
		check("after that")
		slog.New(NewHandler(w, false, slog.LevelInfo)).With("a", 1).Warn("x")
		synctest.Wait()
		if got := out.take(); len(got) != 1 || got[0] < 20 {
			t.Errorf("a record that is no line of the access log: writes of %d bytes, want one with what waited", got)
		}
		write(10)
		closeWriter(t, w)
		check("closed", 10)
	})
}

// writes keeps the sizes of the Writes that it gets.
type writes struct {
	mu    sync.Mutex
	sizes []int
}

func (w *writes) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sizes = append(w.sizes, len(p))
	return len(p), nil
}

func (w *writes) take() []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	sizes := w.sizes
	w.sizes = nil
	return sizes
}

func TestAsyncWriterCloseDoesNotWaitForever(t *testing.T) {
	g := newGate()
	w := NewAsyncWriter(g)
	_, _ = io.WriteString(w, "x\n")
	<-g.entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Close = %v, want %v", err, context.Canceled)
	}
	close(g.open)
	closeWriter(t, w) // and the goroutine has ended
}

func TestAsyncWriterAtOnce(t *testing.T) {
	var out buffer
	w := NewAsyncWriter(&out)
	w.Queue = 1 << 10
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				_, _ = io.WriteString(w, "a line of some bytes\n")
			}
		})
	}
	wg.Wait()
	closeWriter(t, w)
	written := strings.Count(out.String(), "a line of some bytes\n")
	said := 0
	for _, m := range droppedLine.FindAllStringSubmatch(out.String(), -1) {
		n, _ := strconv.Atoi(m[1])
		said += n
	}
	if written+int(w.Dropped()) != 2000 || said != int(w.Dropped()) {
		t.Errorf("%d written, %d dropped, %d said to be dropped; want 2000 in all", written, w.Dropped(), said)
	}
}

func BenchmarkAsyncWriter(b *testing.B) {
	w := NewAsyncWriter(io.Discard)
	line := []byte(strings.Repeat("x", 300) + "\n")
	b.ReportAllocs()
	for b.Loop() {
		_, _ = w.Write(line)
	}
	_ = w.Close(b.Context())
}
