package testnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// An Ending is how a side sees the other's direction.
type Ending string

// The endings.
const (
	FIN  Ending = "FIN"  // the end of the stream: what was sent is whole
	RST  Ending = "RST"  // an error: something may be missing
	Open Ending = "open" // nothing so far
)

// EndingOf says what a read's error means. A deadline that has passed means
// Open.
func EndingOf(err error) Ending {
	switch {
	case err == nil || errors.Is(err, os.ErrDeadlineExceeded):
		return Open
	case err == io.EOF:
		return FIN
	}
	return RST
}

const (
	endingBytes  = 1 << 20  // what goes one way after the other way has ended
	cutBytes     = 64 << 10 // what goes ahead of an abort
	endingWait   = 30 * time.Second
	endingStream = Stream(1)
)

// Endings is what a carrier is expected to do in each scenario of TestEndings.
type Endings struct {
	Reply      int64  // bytes of a 1 MiB reply after the client's FIN that reach the client
	Upload     int64  // bytes of a 1 MiB upload after the backend's FIN that reach the backend
	BackendRST Ending // how the client sees a backend's abort
	ClientRST  Ending // how the backend sees a client's abort
	CutRST     Ending // how the client sees 64 KiB and then an abort

	// Silent is what becomes of a tunnel with one direction ended and the
	// other silent: Open if it is still usable after SilentFor, RST or FIN if
	// the client sees that within SilentFor.
	Silent    Ending
	SilentFor time.Duration // 0 means 300 ms
}

// Transparent is what a carrier does that hides nothing, with a half-closed
// limit longer than the test.
func Transparent() Endings {
	return Endings{Reply: endingBytes, Upload: endingBytes, BackendRST: RST, ClientRST: RST, CutRST: RST, Silent: Open}
}

// TestEndings runs the six half-close and abort scenarios (the fifth in two
// ways), each a subtest, over streams made by dial.
func TestEndings(t *testing.T, dial Dial, want Endings) {
	for _, s := range []struct {
		name string
		run  func(*testing.T, net.Conn, net.Conn)
	}{
		{"client FIN then reply", func(t *testing.T, c, s net.Conn) { halfClose(t, c, s, want.Reply) }},
		{"backend FIN then upload", func(t *testing.T, c, s net.Conn) { halfClose(t, s, c, want.Upload) }},
		{"backend RST", func(t *testing.T, c, s net.Conn) { aborted(t, s, c, want.BackendRST) }},
		{"client RST", func(t *testing.T, c, s net.Conn) { aborted(t, c, s, want.ClientRST) }},
		{"bytes then RST", func(t *testing.T, c, s net.Conn) { cut(t, c, s, want.CutRST) }},
		{"bytes then RST at once", func(t *testing.T, c, s net.Conn) { cutAtOnce(t, c, s, want.CutRST) }},
		{"half-closed and silent", func(t *testing.T, c, s net.Conn) { silent(t, c, s, want) }},
	} {
		t.Run(s.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), endingWait)
			defer cancel()
			client, server, err := dial(ctx)
			if err != nil {
				t.Fatalf("dial: %v", err)
			}
			defer client.Close()
			defer server.Close()
			if err := pingPong(client, server); err != nil {
				t.Fatalf("before the scenario: %v", err)
			}
			s.run(t, client, server)
		})
	}
}

// pingPong moves a byte each way, so that all of the path stands.
func pingPong(a, b net.Conn) error {
	for range 2 {
		if _, err := a.Write([]byte{1}); err != nil {
			return err
		}
		_ = b.SetReadDeadline(time.Now().Add(endingWait))
		if _, err := io.ReadFull(b, make([]byte, 1)); err != nil {
			return fmt.Errorf("a byte that was sent did not arrive: %w", err)
		}
		a, b = b, a
	}
	return nil
}

// drain reads to the end, or for d, checking every byte.
func drain(c net.Conn, d time.Duration) (n int64, end Ending, err error) {
	_ = c.SetReadDeadline(time.Now().Add(d))
	buf := make([]byte, 32<<10)
	for {
		m, err := c.Read(buf)
		if cerr := endingStream.Check(buf[:m], n); cerr != nil {
			return n, RST, cerr
		}
		n += int64(m)
		if err != nil {
			return n, EndingOf(err), nil
		}
	}
}

// halfClose ends first's direction and lets the other side answer with many
// bytes; want of them arrive.
func halfClose(t *testing.T, first, other net.Conn, want int64) {
	if err := CloseWrite(first); err != nil {
		t.Fatal(err)
	}
	if n, end, err := drain(other, endingWait); n != 0 || end != FIN || err != nil {
		t.Fatalf("the other side saw %d bytes and %s (%v), want 0 and FIN", n, end, err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		p := make([]byte, endingBytes)
		endingStream.Fill(p, 0)
		_ = other.SetWriteDeadline(time.Now().Add(endingWait))
		if _, err := other.Write(p); err == nil { // a carrier without half-close is gone by now
			_ = CloseWrite(other)
		}
	})
	n, end, err := drain(first, endingWait)
	if n != want || err != nil {
		t.Errorf("%d of %d bytes arrived after the FIN (%v), want %d", n, endingBytes, err, want)
	}
	if want == endingBytes && end != FIN {
		t.Errorf("the answer ended with %s, want FIN", end)
	}
}

func aborted(t *testing.T, first, other net.Conn, want Ending) {
	if err := Abort(first); err != nil {
		t.Fatal(err)
	}
	if n, end, err := drain(other, endingWait); n != 0 || end != want || err != nil {
		t.Errorf("the other side saw %d bytes and %s (%v), want 0 and %s", n, end, err, want)
	}
}

// cut aborts the server's end once all bytes have arrived; that they had to is
// what makes a FIN look like a whole stream.
func cut(t *testing.T, client, server net.Conn, want Ending) {
	p := make([]byte, cutBytes)
	endingStream.Fill(p, 0)
	var wg sync.WaitGroup
	defer wg.Wait()
	got := make([]byte, cutBytes)
	wg.Go(func() {
		_ = server.SetWriteDeadline(time.Now().Add(endingWait))
		_, _ = server.Write(p)
	})
	_ = client.SetReadDeadline(time.Now().Add(endingWait))
	n, err := io.ReadFull(client, got)
	if err != nil {
		t.Fatalf("%d of %d bytes arrived: %v", n, cutBytes, err)
	}
	if err := endingStream.Check(got, 0); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if err := Abort(server); err != nil {
		t.Fatal(err)
	}
	if n, end, _ := drain(client, endingWait); n != 0 || end != want {
		t.Errorf("after %d bytes the client saw %d more and %s, want 0 and %s", cutBytes, n, end, want)
	}
}

// cutAtOnce aborts with bytes on the way: any prefix may arrive.
func cutAtOnce(t *testing.T, client, server net.Conn, want Ending) {
	p := make([]byte, cutBytes)
	endingStream.Fill(p, 0)
	_ = server.SetWriteDeadline(time.Now().Add(endingWait))
	if _, err := server.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := Abort(server); err != nil {
		t.Fatal(err)
	}
	if n, end, err := drain(client, endingWait); n > cutBytes || end != want || err != nil {
		t.Errorf("the client saw %d bytes and %s (%v), want a prefix of %d and %s", n, end, err, cutBytes, want)
	}
}

func silent(t *testing.T, client, server net.Conn, want Endings) {
	d := want.SilentFor
	if d == 0 {
		d = 300 * time.Millisecond
	}
	if err := CloseWrite(client); err != nil {
		t.Fatal(err)
	}
	if n, end, err := drain(server, endingWait); n != 0 || end != FIN || err != nil {
		t.Fatalf("the backend saw %d bytes and %s (%v), want 0 and FIN", n, end, err)
	}
	if n, end, err := drain(client, d); n != 0 || end != want.Silent || err != nil {
		t.Fatalf("half-closed and silent for %v: the client saw %d bytes and %s (%v), want 0 and %s", d, n, end, err, want.Silent)
	}
	if want.Silent != Open {
		// The backend has had its end of stream: it learns the rest by writing.
		Eventually(t, endingWait, func() bool { _, err := server.Write([]byte{0}); return err != nil },
			"a write of the backend fails once the client's side is gone")
		return
	}
	_ = client.SetReadDeadline(time.Now().Add(endingWait))
	if _, err := server.Write([]byte{7}); err != nil {
		t.Fatalf("the backend's write after the silence: %v", err)
	}
	var got [1]byte
	if _, err := io.ReadFull(client, got[:]); err != nil || got[0] != 7 {
		t.Errorf("after the silence the client got %d, %v; want 7", got[0], err)
	}
}
