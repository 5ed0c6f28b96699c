package h2

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"
)

// Whatever the reads and the looks, the bytes come in order and each once, and the buffer is
// large only while there is much.
func TestReadBuffer(t *testing.T) {
	want := make([]byte, 1<<20)
	for i := range want {
		want[i] = byte(i * 31 >> 4)
	}
	for name, in := range map[string]io.Reader{
		"all at once": bytes.NewReader(want), "by halves": iotest.HalfReader(bytes.NewReader(want)), "byte by byte": iotest.OneByteReader(bytes.NewReader(want)),
		"with its end": iotest.DataErrReader(bytes.NewReader(want)),
	} {
		t.Run(name, func(t *testing.T) {
			b := newReadBuffer(in)
			for n, step := 0, 1; n < len(want); step = step*5%16411 + 1 {
				size := min(step, len(want)-n)
				p, err := b.Peek(size)
				if err != nil || !bytes.Equal(p, want[n:n+size]) {
					t.Fatalf("Peek of %d after %d: %v, or others", size, n, err)
				}
				if step%2 == 0 {
					if m, err := b.Discard(size); m != size || err != nil {
						t.Fatalf("Discard of %d after %d: %d, %v", size, n, m, err)
					}
				} else {
					got := make([]byte, size)
					if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want[n:n+size]) {
						t.Fatalf("Read of %d after %d: %v, or others", size, n, err)
					}
				}
				n += size
			}
			if _, err := b.Peek(1); err != io.EOF {
				t.Errorf("after the last byte: %v, want EOF", err)
			}
			b.free()
		})
	}
}

func TestReadBufferIsSmallAtRest(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	b := newReadBuffer(r)
	for _, n := range []int{10, 100 << 10, 10, 10} {
		go func() { _, _ = w.Write(make([]byte, n)) }()
		if m, err := b.Discard(n); m != n || err != nil {
			t.Fatalf("Discard: %d, %v", m, err)
		}
		if n > bulkBuffer && b.bulk == nil {
			t.Error("much is read into a small buffer")
		}
	}
	if b.bulk != nil || len(b.b) != restBuffer {
		t.Errorf("a buffer of %d bytes after little came twice, want %d", len(b.b), restBuffer)
	}
	if _, err := b.Peek(bulkBuffer + 1); err == nil {
		t.Error("a look at more than a buffer holds, and no error")
	}
}
