package testnet

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// maxStatesInput limits the inputs of FuzzStates. Longer ones find nothing that
// shorter ones do not, and take their time.
const maxStatesInput = 300 // bytes

// FuzzStates fuzzes the states of a connection: run plays a peer that does what
// its input says, in a bubble of synctest. The input is never empty, so its
// first byte may select a mode of the peer; EachOperation reads the others.
func FuzzStates(f *testing.F, run func(t *testing.T, input []byte)) {
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) == 0 || len(input) > maxStatesInput {
			return
		}
		synctest.Test(t, func(t *testing.T) { run(t, input) })
	})
}

// EachOperation calls do for each operation of input, until one has failed the
// test. An operation is three bytes: its number and two arguments.
func EachOperation(t *testing.T, input []byte, do func(op, a, b byte)) {
	for ; len(input) >= 3 && !t.Failed(); input = input[3:] {
		do(input[0], input[1], input[2])
	}
}

// Pick returns the value that arg, an operation's argument, selects.
func Pick[T any](arg byte, values ...T) T { return values[int(arg)%len(values)] }

// Pattern returns n bytes of a sequence that begins to repeat after 64 KiB,
// from offset off on.
func Pattern(off, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte((off+i)*31 + (off+i)>>8*7 + 1)
	}
	return b
}

// CheckEnds reads c to its end and fails the test if that is not there within a
// second.
func CheckEnds(t testing.TB, c net.Conn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.Copy(io.Discard, struct{ io.Reader }{c}); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("got no end of the stream within a second, want one")
	}
}

// A OnceDialer returns its connection to the first caller and an error to all
// others.
type OnceDialer struct {
	mu   sync.Mutex
	conn net.Conn // guarded by mu; nil once it was returned
}

// DialOnce returns a OnceDialer of c.
func DialOnce(c net.Conn) *OnceDialer { return &OnceDialer{conn: c} }

// DialContext returns the connection.
func (d *OnceDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.conn
	if d.conn = nil; c == nil {
		return nil, net.ErrClosed
	}
	return c, nil
}
