package reverse

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// Names of the protocol, below tunnel.ReservedZone.
var (
	// Name is asked of a gateway, by CONNECT, for a session.
	Name = tunnel.MustParseName("reverse." + tunnel.ReservedZone)

	// controlName is asked by the gateway for the first stream of a session.
	controlName = tunnel.MustParseName("control." + tunnel.ReservedZone)
)

// Limits and times of the protocol.
const (
	version      = 1
	maxLine      = 64 << 10 // bytes of a JSON line, with its end
	maxAnswer    = 1 << 20  // bytes of one with Results, which are longer than what was asked for
	maxTexts     = 64 << 10 // bytes of the errors in one answer: with escapes it stays below maxAnswer
	maxNamesOf   = 1000     // registrations of one session
	lineBuffer   = 256      // bytes that are read of lines at once; most are short
	maxStreams   = 1000     // of a session
	headTimeout  = 10 * time.Second
	pingEvery    = 3 * time.Second
	deadAfter    = 6 * time.Second        // without a byte
	namesEvery   = 100 * time.Millisecond // between two changes of the names of a session
	writeTimeout = 10 * time.Second       // of a control line
)

// A hello opens a session: the connector's first line.
type hello struct {
	Version   int            `json:"version"`
	Connector string         `json:"connector"` // what the connector calls this process
	Register  []Registration `json:"register"`
	Have      []string       `json:"have,omitempty"` // replicas that the connector has a session to: it wants another one
}

// A welcome is the gateway's answer to a hello. After its line both sides speak HTTP/2, and
// the gateway is the client.
type welcome struct {
	Version int      `json:"version"`
	Replica string   `json:"replica,omitempty"` // what the gateway calls this process
	Names   []Result `json:"names,omitempty"`
	Same    bool     `json:"same,omitempty"`  // the connector has a session to this replica; the stream ends
	Error   string   `json:"error,omitempty"` // why there is no session; the stream ends
}

// A Result is the gateway's answer to one Registration.
type Result struct {
	Name   tunnel.Pattern `json:"name"`
	Port   uint16         `json:"port,omitzero"`
	Reason tunnel.Reason  `json:"reason,omitempty"` // why the gateway has refused it; "" if it has not
	Error  string         `json:"error,omitempty"`
	Taken  bool           `json:"taken,omitempty"`  // it belongs to another owner, which those alone are told that may register it
	Shared bool           `json:"shared,omitempty"` // other connectors of the owner have it, too, and share its requests
}

// A control is a line on the control stream.
type control struct {
	Kind     string         `json:"kind"`
	Register []Registration `json:"register,omitempty"` // of register: all names from now on
	More     bool           `json:"more,omitempty"`     // of register: the list goes on in the next such line
	Names    []Result       `json:"names,omitempty"`    // of registered
	Count    int            `json:"count,omitzero"`     // of tickets, from the connector: how many more it wants
	Tickets  []poolTicket   `json:"tickets,omitempty"`  // of tickets, from the gateway
}

// Kinds of control lines. Others are ignored.
const (
	kindPing       = "ping"       // either side, every pingEvery
	kindRegister   = "register"   // the connector has other names
	kindRegistered = "registered" // the answer to register
	kindDrain      = "drain"      // the sender is about to stop: use others
	kindTickets    = "tickets"    // for pool connections: the wish for them, and the answer
)

// readJSON reads one line into v. If the line itself is at fault, the error is an *tunnel.Error.
func readJSON(r *bufio.Reader, v any) error { return readLine(r, v, maxLine) }

// readLine is readJSON of a line of at most limit bytes.
func readLine(r *bufio.Reader, v any, limit int) error {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if len(line)+len(part) > limit {
			return tunnel.Refusef(tunnel.TooLarge, "reverse: a line of more than %d bytes", limit)
		}
		line = append(line, part...)
		switch {
		case err == nil:
			return parseLine(line, v)
		case !errors.Is(err, bufio.ErrBufferFull):
			if err == io.EOF && len(line) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
}

func parseLine(line []byte, v any) error {
	if err := json.Unmarshal(line, v); err != nil {
		return tunnel.Refusef(tunnel.BadRequest, "reverse: a line is not what the protocol has: %w", err)
	}
	return nil
}

// writeJSON writes v as one line.
func writeJSON(w io.Writer, v any) error { return writeLine(w, v, maxLine) }

// writeLine is writeJSON of a line of at most limit bytes.
func writeLine(w io.Writer, v any, limit int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) >= limit {
		return tunnel.Refusef(tunnel.TooLarge, "reverse: a line of more than %d bytes", limit)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// A carrierConn is the stream that a session is on. Bytes that were read together with its hello or
// welcome are read first.
type carrierConn struct {
	net.Conn
	early *bufio.Reader // nil once it is empty
	heard atomic.Int64  // when the last byte came, by clock
	dead  atomic.Bool   // closed by kill
}

func newCarrierConn(c net.Conn) *carrierConn {
	k := &carrierConn{Conn: c}
	k.early = bufio.NewReaderSize(readerFunc(k.read), lineBuffer)
	k.heard.Store(clock())
	return k
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func (k *carrierConn) read(b []byte) (int, error) {
	n, err := k.Conn.Read(b)
	if n > 0 {
		k.heard.Store(clock())
	}
	return n, err
}

// Read implements net.Conn.
func (k *carrierConn) Read(b []byte) (int, error) {
	if k.early != nil && k.early.Buffered() > 0 {
		return k.early.Read(b)
	}
	k.early = nil
	return k.read(b)
}

// NetConn returns the connection below k.
func (k *carrierConn) NetConn() net.Conn { return k.Conn }

// silent returns how long no byte has come.
func (k *carrierConn) silent() time.Duration { return time.Duration(clock() - k.heard.Load()) }

// watch kills the carrier once it is silent for too long, until stop is called. It writes
// nothing: a Write on a path that is dead may not return. caught is called with a panic.
func (k *carrierConn) watch(caught func(v any)) (stop func()) {
	return every(time.Second, caught, func() bool {
		if k.silent() < deadAfter {
			return true
		}
		k.kill()
		return false
	})
}

// every calls f after each d, in a goroutine that lasts for the call alone, until f returns false or
// panics, or stop is called. stop waits for a call that is under way. caught is called with a panic.
func every(d time.Duration, caught func(v any), f func() bool) (stop func()) {
	var mu sync.Mutex // held over f, and guards what follows
	stopped := false
	var timer *time.Timer
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(d, func() {
		defer func() {
			if v := recover(); v != nil {
				caught(v)
			}
		}()
		mu.Lock()
		defer mu.Unlock()
		if !stopped && f() {
			timer.Reset(d)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}

// kill ends a carrier whose path is dead.
func (k *carrierConn) kill() {
	k.dead.Store(true)
	k.abort()
}

// abort ends a carrier without a last record of TLS: the other side may not read, and the record would
// wait for room.
func (k *carrierConn) abort() { _ = connect.Abort(k.Conn) }

var clockStart = time.Now()

// clock is monotonic, in nanoseconds.
func clock() int64 { return int64(time.Since(clockStart)) }

// A controlStream has the lines of a session's control stream.
type controlStream struct {
	conn net.Conn
	mu   sync.Mutex // of writes
}

func (s *controlStream) send(v control) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
	if v.Kind == kindRegistered {
		return writeLine(s.conn, v, maxAnswer)
	}
	return writeJSON(s.conn, v)
}

// ping sends pings until stop is called. It kills a carrier that takes none. caught is called with a
// panic.
func (s *controlStream) ping(carrier *carrierConn, caught func(v any)) (stop func()) {
	return every(pingEvery, caught, func() bool {
		err := s.send(control{Kind: kindPing})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			carrier.kill()
		}
		return err == nil // or the reader of the stream ends the session
	})
}

// read calls handle with each line of at most limit bytes, until the stream ends or handle
// fails, and returns why.
func (s *controlStream) read(limit int, handle func(*control) error) error {
	r := bufio.NewReaderSize(s.conn, lineBuffer)
	for {
		c := new(control)
		if err := readLine(r, c, limit); err != nil {
			return err
		}
		if err := handle(c); err != nil {
			return err
		}
	}
}

// errDead is the error of a session whose carrier is silent.
var errDead = errors.New("reverse: nothing has come on the session for too long")

// callerFields returns the fields that describe the caller of req to the other side, where
// connect.UnverifiedHeaders reads them.
func callerFields(req *tunnel.Request) connect.Fields {
	said := connect.SaidOf(req)
	var f connect.Fields
	for _, one := range [...]connect.Field{{Name: "traceparent", Value: said.Trace}, {Name: "baggage", Value: said.Baggage}, {Name: "forwarded", Value: said.Forwarded}} {
		if one.Value != "" {
			f = append(f, one)
		}
	}
	return f
}
