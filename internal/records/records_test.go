package records

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testca"
)

// A counter counts the writes and the reads that had something.
type counter struct {
	net.Conn
	mu            sync.Mutex
	writes, reads int
	most          int // bytes of one write
}

func (c *counter) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.writes++
	c.most = max(c.most, len(p))
	c.mu.Unlock()
	return c.Conn.Write(p)
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > 0 {
		c.reads++
	}
	return n, err
}

func (c *counter) counts() (writes, reads, most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writes, c.reads, c.most
}

// pair returns both ends of TLS, and what the first one writes to.
func pair(t testing.TB) (*Conn, *tls.Conn, *counter) {
	t.Helper()
	ca, err := testca.New("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://test/a", DNSNames: []string{"a.test"}, Usage: testca.Both})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	below := &counter{Conn: near}
	client := Client(below, keys.ClientConfig("a.test"))
	server := tls.Server(far, keys.ServerConfig())
	t.Cleanup(func() {
		_ = near.Close()
		_ = far.Close()
	})
	shaken := make(chan error, 1)
	go func() { shaken <- server.Handshake() }()
	if err := errors.Join(client.Handshake(), <-shaken); err != nil {
		t.Fatal(err)
	}
	return client, server, below
}

// Much leaves in few writes and comes in few reads, and arrives as it was.
func TestFewSystemCalls(t *testing.T) {
	client, server, below := pair(t)
	want := make([]byte, 4<<20)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	before, _, _ := below.counts()
	sent := make(chan error, 1)
	go func() {
		_, err := client.Write(want)
		sent <- err
	}()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(server, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the bytes that came are others, or not all: %v", err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if writes, _, most := below.counts(); writes-before != len(want)/Size || most > Size+overhead {
		t.Errorf("%d writes of at most %d bytes, want %d of at most %d", writes-before, most, len(want)/Size, Size+overhead)
	}

	go func() {
		_, err := server.Write(want)
		sent <- err
	}()
	_, before, _ = below.counts()
	calls, p := 0, make([]byte, 64<<10)
	for n := 0; n < len(want); calls++ {
		m, err := client.Read(p)
		if err != nil || !bytes.Equal(p[:m], want[n:n+m]) {
			t.Fatalf("after %d bytes: others came, or %v", n, err)
		}
		n += m
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	// The server writes each record by itself, and what has come together is read together.
	if _, reads, _ := below.counts(); calls > len(want)/MaxRecord+8 || reads-before > 2*len(want)/MaxRecord {
		t.Errorf("%d calls of Read and %d of the connection's for %d records", calls, reads-before, len(want)/MaxRecord)
	}
}

// A Read does not wait for more than what it has, and gives up no buffer with bytes in it.
func TestReadDoesNotWait(t *testing.T) {
	client, server, _ := pair(t)
	_ = client.SetDeadline(time.Now().Add(time.Minute))
	for _, size := range []int{1, MaxRecord, MaxRecord + 1, 3*MaxRecord + 100, 200 << 10, 1, 5} {
		sent := make(chan error, 1)
		go func() {
			_, err := server.Write(bytes.Repeat([]byte{byte(size)}, size))
			sent <- err
		}()
		p := make([]byte, 1<<20)
		for n := 0; n < size; {
			m, err := client.Read(p)
			if err != nil || m == 0 || p[m-1] != byte(size) {
				t.Fatalf("%d bytes: after %d: %d more, %v", size, n, m, err)
			}
			n += m
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
	}
	if in := &client.below.input; in.buf != nil && in.r == in.w && !in.full {
		t.Error("a buffer is kept without bytes")
	}
	if err := server.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Read(make([]byte, 10)); n != 0 || err != io.EOF {
		t.Errorf("after close_notify: %d, %v; want EOF", n, err)
	}
}

// Close ends a Write that the other side takes nothing of.
func TestCloseEndsWrite(t *testing.T) {
	client, _, _ := pair(t)
	wrote := make(chan error, 1)
	go func() {
		_, err := client.Write(make([]byte, 64<<20))
		wrote <- err
	}()
	for n := 0; ; { // until it waits
		writes, _, _ := client.NetConn().(*counter).counts()
		<-time.After(50 * time.Millisecond)
		if writes == n && n > 2 {
			break
		}
		n = writes
	}
	_ = client.Close()
	if err := <-wrote; err == nil {
		t.Error("the Write has succeeded, want an error")
	}
}

// After a Flush that has failed nothing is written: the other side could not read it.
func TestNothingFollowsHalfARecord(t *testing.T) {
	var b Batch
	broken := errors.New("broken")
	b.Gather()
	if n, err := b.Write([]byte("abc"), nil); n != 3 || err != nil {
		t.Fatalf("Write: %d, %v", n, err)
	}
	if err := b.Flush(func(p []byte) (int, error) { return 1, broken }); err != broken {
		t.Errorf("Flush: %v, want %v", err, broken)
	}
	if n, err := b.Write([]byte("d"), func([]byte) (int, error) { return 1, nil }); n != 0 || err != broken {
		t.Errorf("Write: %d, %v; want none and %v", n, err, broken)
	}
}

// A relay that is stuck after a Read has all that was read: nothing is kept for it here.
func TestRelaysLeaveNothingRead(t *testing.T) {
	client, server, _ := pair(t)
	_ = client.SetDeadline(time.Now().Add(time.Minute))
	const much = 8 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := server.Write(make([]byte, much))
		sent <- err
	}()
	buffered := 0
	p := make([]byte, Size)
	for n := 0; n < much; {
		m, err := client.Read(p)
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		n += m
		if client.below.input.full {
			buffered++
		}
		if client.below.input.buf != nil {
			t.Fatalf("after %d bytes a buffer of %d is kept, with %d bytes", n, inputSize, client.below.input.w-client.below.input.r)
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if buffered == 0 {
		t.Error("no Read was large: the test tests nothing")
	}
}

// Close waits a second, and not five, for a peer that takes nothing. A peer that takes it gets
// the close_notify.
func TestCloseAtAPeerThatTakesNothing(t *testing.T) {
	ca, err := testca.New("test", nil)
	if err != nil {
		t.Fatal(err)
	}
	keys, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://test/a", DNSNames: []string{"a.test"}, Usage: testca.Both})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now() // in which the certificates are valid
	for _, c := range []struct {
		name   string
		reads  bool
		before func(*Conn)
		want   time.Duration
	}{
		{"nothing is taken", false, func(*Conn) {}, time.Second},
		{"and a Write waits", false, func(c *Conn) {
			go func() { _, _ = c.Write([]byte("x")) }()
			synctest.Wait()
		}, 0},
		{"all is taken", true, func(*Conn) {}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				config, serverConfig := keys.ClientConfig("a.test"), keys.ServerConfig()
				config.Time, serverConfig.Time = func() time.Time { return now }, func() time.Time { return now }
				client, server := Client(near, config), tls.Server(far, serverConfig)
				shaken := make(chan error, 1)
				go func() {
					err := server.Handshake()
					if err == nil {
						_, err = server.Write([]byte("x")) // with its tickets
					}
					shaken <- err
				}()
				if _, err := io.ReadFull(client, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				if err := <-shaken; err != nil {
					t.Fatal(err)
				}
				end := make(chan error, 1)
				if c.reads {
					go func() {
						_, err := server.Read(make([]byte, 1))
						end <- err
					}()
				}
				c.before(client)
				start := time.Now()
				_ = client.Close()
				if took := time.Since(start); took != c.want {
					t.Errorf("Close took %v, want %v", took, c.want)
				}
				if c.reads {
					if err := <-end; err != io.EOF {
						t.Errorf("the peer read %v, want EOF by a close_notify", err)
					}
				}
				_ = far.Close()
			})
		})
	}
}
