package h3

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"

	"culvert.dev/connect"
)

// A raw is a peer that speaks QUIC and says what it likes in it.
type raw struct {
	t  testing.TB
	qc *quic.Conn
}

// rawClient connects to addr. It has said nothing.
func rawClient(t testing.TB, addr string) *raw {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	cfg := clientTLS()
	cfg.NextProtos = []string{"h3"}
	tr := &quic.Transport{Conn: socket(t)}
	t.Cleanup(func() { _ = tr.Close() })
	to, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	qc, err := tr.Dial(ctx, to, cfg, &quic.Config{EnableDatagrams: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = qc.CloseWithError(0, "") })
	return &raw{t: t, qc: qc}
}

// begin opens the control stream and says the settings, and returns it.
func (r *raw) begin() *quic.SendStream {
	r.t.Helper()
	return r.uni(appendSettings(quicvarint.Append(nil, streamControl)))
}

// uni opens a unidirectional stream that begins with b.
func (r *raw) uni(b []byte) *quic.SendStream {
	r.t.Helper()
	s, err := r.openUni()
	if err != nil {
		r.t.Fatal(err)
	}
	_, _ = s.Write(b)
	return s
}

// openUni opens a unidirectional stream, and fails where the peer permits none
// for long.
func (r *raw) openUni() (*quic.SendStream, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), testTimeout)
	defer cancel()
	s, err := r.qc.OpenUniStreamSync(ctx)
	if err == nil {
		_ = s.SetWriteDeadline(time.Now().Add(testTimeout))
	}
	return s, err
}

// A rawStream is one request stream of a raw peer.
type rawStream struct {
	t  testing.TB
	qs *quic.Stream
	in frameReader
}

// open opens a request stream that begins with b.
func (r *raw) open(b []byte) *rawStream {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), testTimeout)
	defer cancel()
	qs, err := r.qc.OpenStreamSync(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	_ = qs.SetDeadline(time.Now().Add(testTimeout))
	_, _ = qs.Write(b)
	return &rawStream{t: r.t, qs: qs, in: frameReader{r: qs}}
}

// request opens a stream with a header list of names and values.
func (r *raw) request(pairs ...string) *rawStream {
	r.t.Helper()
	return r.open(headOf(pairs...))
}

func headOf(pairs ...string) []byte {
	var list connect.Fields
	for i := 0; i < len(pairs); i += 2 {
		list = append(list, connect.Field{Name: pairs[i], Value: pairs[i+1]})
	}
	return appendHead(nil, list)
}

func (s *rawStream) reset(code ErrCode) {
	s.qs.CancelWrite(quic.StreamErrorCode(code))
	s.qs.CancelRead(quic.StreamErrorCode(code))
}

// data sends a DATA frame.
func (s *rawStream) data(text string) {
	_, _ = s.qs.Write(append(appendFrameHead(nil, frameData, uint64(len(text))), text...))
}

// An answer is what came on a stream until it ended, or until the 200.
type answer struct {
	status int
	fields connect.Fields
	body   string
	end    bool
	reset  ErrCode // 0 where there was none
	err    error   // of the connection
}

// answer reads until the fate of the stream is known.
func (s *rawStream) answer() answer {
	s.t.Helper()
	var a answer
	for {
		t, err := s.in.next()
		if err == nil {
			var b []byte
			if b, err = s.in.payload(); err == nil && t == frameHeaders {
				r, err := decodeHead(b)
				if err != nil || !r.IsAnswer() {
					s.t.Fatalf("an answer that is none: %v, %q", err, r.Wrong())
				}
				a.status, a.fields = r.List.Status, r.List.Fields
				if a.status == 200 {
					return a
				}
			}
			if t == frameData {
				a.body += string(b)
			}
		}
		if err == nil {
			continue
		}
		se, reset := errors.AsType[*quic.StreamError](err)
		switch {
		case err == io.EOF:
			a.end = true
		case reset:
			a.reset = ErrCode(se.ErrorCode)
		case errors.Is(err, os.ErrDeadlineExceeded): // the stream's own deadline
			s.t.Fatalf("no answer: %v", err)
		default:
			a.err = err
		}
		return a
	}
}

// ended waits for the end of the connection and returns the code the peer gave.
func (r *raw) ended() ErrCode {
	r.t.Helper()
	select {
	case <-r.qc.Context().Done():
	case <-time.After(testTimeout):
		r.t.Fatal("the connection does not end")
	}
	err := context.Cause(r.qc.Context())
	ae, ok := errors.AsType[*quic.ApplicationError](err)
	if !ok || !ae.Remote {
		r.t.Fatalf("the connection ended with %v, want the peer's own code", err)
	}
	return ErrCode(ae.ErrorCode)
}

// A proxyRaw is a raw server.
type proxyRaw struct {
	addr string
	ln   *quic.Listener
}

func rawProxy(t testing.TB) *proxyRaw {
	t.Helper()
	pc := socket(t)
	tr := &quic.Transport{Conn: pc}
	t.Cleanup(func() { _ = tr.Close() })
	ln, err := tr.Listen(tlsConfig(serverTLS()), &quic.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &proxyRaw{pc.LocalAddr().String(), ln}
}

func (p *proxyRaw) accept(t testing.TB) *raw {
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	qc, err := p.ln.Accept(ctx)
	if err != nil {
		t.Error(err)
		return nil
	}
	r := &raw{t: t, qc: qc}
	r.begin()
	return r
}

// stream accepts a request stream.
func (r *raw) stream(t testing.TB) *rawStream {
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	qs, err := r.qc.AcceptStream(ctx)
	if err != nil {
		t.Error(err)
		return nil
	}
	return &rawStream{t: t, qs: qs, in: frameReader{r: qs}}
}

// A relay carries datagrams between one client and a server, and may change
// the port that the server sees.
type relay struct {
	addr    string
	near    *net.UDPConn
	to      *net.UDPAddr
	silence atomic.Bool
	up      atomic.Int64 // bytes to the server
	down    atomic.Int64 // bytes back

	mu     sync.Mutex // guards what follows
	far    *net.UDPConn
	client *net.UDPAddr
	drop   func(up bool, p []byte) bool // may be nil
}

func newRelay(t testing.TB, server string) *relay {
	to, err := net.ResolveUDPAddr("udp", server)
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{near: socket(t), to: to}
	r.addr = r.near.LocalAddr().String()
	var wg sync.WaitGroup
	r.rebind(t, &wg)
	wg.Go(func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := r.near.ReadFromUDP(buf)
			if err != nil {
				return
			}
			r.mu.Lock()
			r.client = from
			far := r.far
			keep := r.drop == nil || !r.drop(true, buf[:n])
			r.mu.Unlock()
			if keep && !r.silence.Load() {
				r.up.Add(int64(n))
				_, _ = far.WriteToUDP(buf[:n], r.to)
			}
		}
	})
	t.Cleanup(func() {
		_ = r.near.Close()
		r.mu.Lock()
		_ = r.far.Close()
		r.mu.Unlock()
		wg.Wait()
	})
	return r
}

// rebind gives the client another port, as a NAT does that forgets, and leaves
// the old one to nobody.
func (r *relay) rebind(t testing.TB, wg *sync.WaitGroup) {
	far := socket(t)
	r.mu.Lock()
	old := r.far
	r.far = far
	r.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	run := func() {
		buf := make([]byte, 2048)
		for {
			n, _, err := far.ReadFromUDP(buf)
			if err != nil {
				return
			}
			r.mu.Lock()
			client := r.client
			keep := r.drop == nil || !r.drop(false, buf[:n])
			r.mu.Unlock()
			if keep && !r.silence.Load() {
				r.down.Add(int64(n))
				_, _ = r.near.WriteToUDP(buf[:n], client)
			}
		}
	}
	if wg != nil {
		wg.Go(run)
	} else {
		go run() // ends with far, which ends with the test
	}
}

// varints is a sequence of numbers as they are on the wire.
func varints(n ...uint64) []byte {
	var b bytes.Buffer
	for _, v := range n {
		b.Write(quicvarint.Append(nil, v))
	}
	return b.Bytes()
}
