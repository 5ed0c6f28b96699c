package sni

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"culvert.dev/tunnel"
)

// Limits of what is read of a QUIC client before its hello must be complete.
// Ten datagrams of the usual size hold no more than MaxQUICHello.
const (
	MaxQUICHello     = 12 << 10 // bytes of the ClientHello, with the four of its header
	MaxQUICDatagrams = 10       // with an Initial, that it may be spread over
	maxPieces        = 256      // of the hello, apart from each other
)

// ErrStray says that a datagram is no part of the flow it was fed to. It is to
// be dropped, and the flow goes on.
var ErrStray = errors.New("sni: the datagram is no part of this QUIC connection")

// A VersionError is the answer to a first datagram of a version of QUIC whose
// Initials can't be read. See VersionNegotiation.
type VersionError struct {
	Version uint32
	reply   []byte
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("sni: QUIC of version %#08x, which is not supported: there are %#08x and %#08x", e.Version, quicV1, quicV2)
}

// A QUIC reads the ClientHello of one QUIC connection from the datagrams of
// its client, which may come in any order. It decrypts their Initials (RFC
// 9001 section 5.2, RFC 9369): that takes no secret.
//
//	var q sni.QUIC
//	hello, err := q.Feed(datagram)
//	switch {
//	case err == nil:                       // keep the datagrams: the server gets them all
//	case errors.Is(err, sni.ErrMore):      // keep this one, feed the next
//	case errors.Is(err, sni.ErrStray):     // drop this one, feed the next
//	default:                               // a *ParseError or *VersionError: send Refuse(err)
//	}
//
// Once the hello is read, Check looks at what the client sends further, so that
// it does not say another one, to the same server, that nobody has read.
//
// The zero value is ready to use. Its methods may be called at once.
type QUIC struct {
	mu sync.Mutex // guards what follows

	version    uint32
	dcid, scid []byte // of the client's first Initial
	retried    []byte // the id that a Retry told the client to use
	keys       []keyed

	crypto    []byte // the CRYPTO stream, as far as it has come
	have      []extent
	parser    Parser
	datagrams int
	hello     int  // bytes of the hello, once it is complete
	over      bool // the client is past its Initials

	err error // what Feed has answered for good
}

// keyed are keys for what a client writes to an id.
type keyed struct {
	version uint32
	dcid    []byte
	keys    *initialKeys
	largest int64 // packet number, -1 for none
}

// maxKeys is for two versions, before and after a Retry.
const maxKeys = 4

// An extent is a part of the CRYPTO stream.
type extent struct{ from, to int }

// Feed takes in the client's next datagram, which it does not keep.
func (q *QUIC) Feed(datagram []byte) (Hello, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return Hello{}, q.err
	}
	h, err := q.feed(datagram)
	var bad *ParseError
	if errors.As(err, &bad) {
		q.err = err
	}
	return h, err
}

func (q *QUIC) feed(datagram []byte) (Hello, error) {
	first, ok := readLong(datagram)
	if !ok {
		return Hello{}, q.foreign(datagram)
	}
	fresh := q.keys == nil
	if fresh {
		if err := q.begin(datagram, &first); err != nil {
			return Hello{}, err
		}
	} else if !bytes.Equal(first.dcid, q.dcid) {
		return Hello{}, ErrStray // no server has answered, so there is no other id
	}
	initials, err := q.walk(datagram, q.take)
	if fresh && err == ErrStray {
		q.version = 0 // nobody is to be answered
		err = notQUIC("an Initial that does not decrypt, or is mixed with others")
	}
	if err != nil {
		return Hello{}, err
	}
	if initials == 0 {
		if first.typ == packet0RTT {
			return Hello{}, ErrMore // early data, which the server may have a use for
		}
		return Hello{}, ErrStray
	}
	h, err := q.parse()
	if err == nil {
		return h, nil
	}
	if q.datagrams++; err == ErrMore && q.datagrams >= MaxQUICDatagrams {
		err = q.fail(IllegalParameter, MaxQUICDatagrams, "hello is spread over more than %d datagrams", MaxQUICDatagrams)
	}
	return Hello{}, err
}

// foreign judges a datagram that does not begin with a packet we can read.
func (q *QUIC) foreign(datagram []byte) error {
	if q.keys != nil {
		return ErrStray
	}
	h, _, ok := readInvariants(datagram)
	switch {
	case len(datagram) == 0:
		return notQUIC("an empty datagram")
	case datagram[0]&0x80 == 0:
		return notQUIC("begins with %#02x, which is no long header of QUIC", datagram[0])
	case !ok:
		return notQUIC("a long header that is cut off, after %d bytes", len(datagram))
	case h.version == 0:
		return notQUIC("a Version Negotiation packet, which only servers send")
	case h.version != quicV1 && h.version != quicV2:
		return &VersionError{Version: h.version, reply: VersionNegotiation(datagram)}
	}
	return notQUIC("a packet of malformed header or length")
}

// begin takes in the header of the client's first Initial.
func (q *QUIC) begin(datagram []byte, h *longHeader) error {
	switch {
	case h.typ != packetInitial:
		return notQUIC("a packet of no connection we know")
	case len(datagram) < leastDatagram:
		return notQUIC("an Initial in a datagram of %d bytes, want at least %d", len(datagram), leastDatagram)
	case len(h.dcid) < leastFirstID:
		return notQUIC("an Initial to a connection id of %d bytes, want at least %d", len(h.dcid), leastFirstID)
	case h.first&0x40 == 0 && len(h.token) == 0:
		return notQUIC("an Initial without the fixed bit") // RFC 9287 section 3.1: with a token it may be clear
	}
	q.version, q.dcid, q.scid = h.version, bytes.Clone(h.dcid), bytes.Clone(h.scid)
	return nil
}

// keysFor finds or makes the keys for what the client writes to dcid.
func (q *QUIC) keysFor(version uint32, dcid []byte) *keyed {
	for i := range q.keys {
		if k := &q.keys[i]; k.version == version && bytes.Equal(k.dcid, dcid) {
			return k
		}
	}
	if len(q.keys) == maxKeys {
		return nil
	}
	keys, err := newInitialKeys(version, dcid, clientSide)
	if err != nil {
		return nil
	}
	q.keys = append(q.keys, keyed{version, bytes.Clone(dcid), keys, -1})
	return &q.keys[len(q.keys)-1]
}

// walk opens the Initials of a datagram and gives their frames to each. It
// returns how many there were.
//
// All packets of a datagram are for one connection (RFC 9000 section 12.2),
// which not every server makes sure of: a datagram that has another in it is a
// stray, and so is one with an Initial that can't be opened, as the server
// might do what we could not.
func (q *QUIC) walk(datagram []byte, each func(frames []byte) error) (initials int, err error) {
	var to []byte
	for b := datagram; len(b) > 0 && b[0]&0x80 != 0; {
		h, ok := readLong(b)
		if !ok || to != nil && !bytes.Equal(h.dcid, to) || h.typ == packetRetry {
			return initials, ErrStray
		}
		if to = h.dcid; to == nil {
			to = []byte{}
		}
		if h.typ == packetInitial {
			if len(datagram) < leastDatagram {
				return initials, ErrStray // as the server would, RFC 9000 section 14.1
			}
			frames, ok := q.open(b, &h)
			if !ok {
				return initials, ErrStray
			}
			initials++
			if err := each(frames); err != nil {
				return initials, err
			}
		}
		b = b[h.end:]
	}
	return initials, nil
}

// open decrypts an Initial of this connection. Its keys are those of the id
// that the client wrote to first, or was told to by a Retry, even when it
// writes to the server's own by now.
func (q *QUIC) open(packet []byte, h *longHeader) (frames []byte, ok bool) {
	if q.over {
		return nil, false
	}
	for _, id := range [...][]byte{q.retried, q.dcid} {
		if id == nil {
			continue
		}
		k := q.keysFor(h.version, id)
		if k == nil {
			continue
		}
		frames, number, ok := k.keys.open(packet, h, k.largest)
		if ok {
			k.largest = max(k.largest, int64(number))
			return frames, true
		}
	}
	return nil, false
}

// take puts the CRYPTO frames of an Initial into the stream.
func (q *QUIC) take(frames []byte) error {
	return eachFrame(frames, func(at int, data []byte) error {
		if at+len(data) > MaxQUICHello {
			return q.fail(IllegalParameter, MaxQUICHello, "hello is %d bytes or more, limit %d", at+len(data), MaxQUICHello)
		}
		return q.insert(at, data)
	})
}

// insert puts data at its place. Bytes that overlap earlier ones must be equal:
// the server might read a hello from the other copy.
func (q *QUIC) insert(at int, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	add := extent{at, at + len(data)}
	if add.to > len(q.crypto) {
		q.crypto = append(q.crypto, make([]byte, add.to-len(q.crypto))...)
	}
	var merged []extent
	i := 0
	for ; i < len(q.have) && q.have[i].to < add.from; i++ {
		merged = append(merged, q.have[i])
	}
	for ; i < len(q.have) && q.have[i].from <= add.to; i++ {
		old := q.have[i]
		from, to := max(old.from, at), min(old.to, at+len(data))
		if from < to && !bytes.Equal(q.crypto[from:to], data[from-at:to-at]) {
			return q.fail(0, 0, "the hello's bytes %d to %d came twice, and differ", from, to)
		}
		add = extent{min(add.from, old.from), max(add.to, old.to)}
	}
	copy(q.crypto[at:], data)
	q.have = append(append(merged, add), q.have[i:]...)
	if len(q.have) > maxPieces {
		return q.fail(0, maxPieces, "hello in more than %d pieces", maxPieces)
	}
	return nil
}

// parse reads on in the part of the hello that has no gap.
func (q *QUIC) parse() (Hello, error) {
	n := 0
	if len(q.have) > 0 && q.have[0].from == 0 {
		n = q.have[0].to
	}
	b := q.crypto[:n]
	if n >= helloHeader {
		if size := helloHeader + (int(b[1])<<16 | int(b[2])<<8 | int(b[3])); b[0] == typeClientHello && size > MaxQUICHello {
			return Hello{}, q.fail(IllegalParameter, MaxQUICHello, "hello is %d bytes, limit %d", size, MaxQUICHello)
		}
	}
	if q.parser.records == 0 { // the message comes without records around it
		q.parser.records, q.parser.record = 1, helloHeader+MaxHello
	}
	h, err := q.parser.Feed(b)
	if err != nil {
		return h, err
	}
	q.hello = h.Len
	q.crypto, q.have = bytes.Clone(b[:h.Len]), nil
	return h, nil
}

// Check reports whether the client's datagram may go to the server that its
// hello was routed to. A datagram may not whose Initial can't be read, or says
// another hello: a server that has forgotten this connection would take it for
// a new one. It is for datagrams after Feed has returned a Hello.
func (q *QUIC) Check(datagram []byte) bool {
	if len(datagram) == 0 || datagram[0]&0x80 == 0 {
		return true // by now the client and the server have keys of their own
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	first, ok := readLong(datagram)
	if !ok {
		return false
	}
	if first.typ == packet0RTT || first.typ == packetHandshake {
		// Nearly always the only one; walk looks for others.
		if first.end == len(datagram) {
			q.past(first.typ)
			return true
		}
	}
	if _, err := q.walk(datagram, q.again); err != nil {
		return false
	}
	for b := datagram; len(b) > 0 && b[0]&0x80 != 0; {
		h, _ := readLong(b)
		q.past(h.typ)
		b = b[h.end:]
	}
	return true
}

// past takes note of a Handshake packet: who sends one is done with Initials,
// RFC 9001 section 4.9.1. The hello need not be kept any more.
func (q *QUIC) past(t packetType) {
	if t == packetHandshake {
		q.over, q.crypto, q.keys = true, nil, nil
	}
}

// again accepts the CRYPTO frames of the hello that was read. Later bytes of
// the stream are the answer to a HelloRetryRequest.
func (q *QUIC) again(frames []byte) error {
	err := eachFrame(frames, func(at int, data []byte) error {
		if at >= q.hello {
			return nil
		}
		if n := min(len(data), q.hello-at); !bytes.Equal(data[:n], q.crypto[at:at+n]) {
			return ErrStray
		}
		return nil
	})
	if err == errClosed { // which is for the server to hear
		return nil
	}
	return err
}

// ServiceDatagram takes note of what the server says to the client: after a Retry the
// client's Initials have other keys.
func (q *QUIC) ServiceDatagram(datagram []byte) {
	if len(datagram) == 0 || datagram[0]&0x80 == 0 {
		return
	}
	h, ok := readLong(datagram)
	if !ok || h.typ != packetRetry {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.retried == nil { // a client takes the first one, RFC 9000 section 17.2.5.2
		q.retried = bytes.Clone(h.scid)
	}
}

// fail makes the error of a hello that can't be taken in.
func (q *QUIC) fail(a Alert, limit int, format string, args ...any) error {
	return &ParseError{Reason: tunnel.BadHello, Alert: a, Limit: limit, Err: fmt.Errorf(format, args...)}
}

func notQUIC(format string, args ...any) error {
	return &ParseError{Reason: tunnel.BadPreamble, Err: fmt.Errorf("not QUIC: "+format, args...)}
}

// errFrame is a frame that no Initial may have in it, or one that is cut off.
var errFrame = &ParseError{Reason: tunnel.BadHello, Err: errors.New("an Initial with a frame that is malformed or must not be there")}

// errClosed is a client that gave up.
var errClosed = &ParseError{Reason: tunnel.Gone, Err: errors.New("the client closed the connection before its hello was complete")}

// The frames that an Initial may have, RFC 9000 section 12.4.
const (
	framePadding = 0x00
	framePing    = 0x01
	frameAck     = 0x02
	frameAckECN  = 0x03
	frameCrypto  = 0x06
	frameClose   = 0x1c
)

// eachFrame goes through the frames of an Initial and gives the CRYPTO frames
// (section 19.6) to crypto: their offset in the stream and their data.
func eachFrame(b []byte, crypto func(at int, data []byte) error) error {
	var bad bool
	next := func() uint64 {
		n, size := varint(b)
		bad = bad || size == 0
		b = b[size:]
		return n
	}
	for len(b) > 0 && !bad {
		switch t := b[0]; t {
		case framePadding, framePing:
			b = b[1:]
		case frameAck, frameAckECN:
			b = b[1:]
			next() // largest acknowledged
			next() // delay
			ranges := next()
			next() // first range
			for i := uint64(0); i < ranges && !bad; i++ {
				next() // gap
				next() // range
			}
			for i := 0; t == frameAckECN && i < 3; i++ {
				next()
			}
		case frameCrypto:
			b = b[1:]
			at, n := next(), next()
			if bad || n > uint64(len(b)) || at > 1<<30 {
				return errFrame
			}
			if err := crypto(int(at), b[:n]); err != nil {
				return err
			}
			b = b[n:]
		case frameClose:
			return errClosed
		default:
			return errFrame
		}
	}
	if bad {
		return errFrame
	}
	return nil
}
