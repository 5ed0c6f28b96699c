package command

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"culvert.dev/identity"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// Intervals of the report.
const (
	exposeEvery   = 200 * time.Millisecond // from one look at the sessions to the next
	progressEvery = 30 * time.Second       // without a terminal, if bytes have moved
	refusalEvery  = 5 * time.Second        // between two lines about requests that failed
	renewEvery    = 5 * time.Second        // between two looks at the files of the credentials
)

func newExposeTick() *time.Ticker { return time.NewTicker(exposeEvery) }

// An exposeEvent is one line of -o json. Fields may be added; those that are here keep their
// names and meanings.
type exposeEvent struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"` // starting, session, waiting, refused, lost, draining, progress, failed-request, stopped
	Name     string    `json:"name"`
	To       string    `json:"to,omitempty"`
	Via      []string  `json:"via,omitempty"`
	Command  string    `json:"command,omitempty"` // that reaches the service
	Gateway  string    `json:"gateway,omitempty"`
	Reason   string    `json:"reason,omitempty"`
	Error    string    `json:"error,omitempty"`
	Hint     string    `json:"hint,omitempty"`
	Count    int64     `json:"count,omitempty"`  // of failed requests like this
	Shared   bool      `json:"shared,omitempty"` // of session: another connector has the name, too
	Sessions *int      `json:"sessions,omitempty"`
	Streams  *int      `json:"streams,omitempty"`
	In       *int64    `json:"in,omitempty"`  // bytes to the service
	Out      *int64    `json:"out,omitempty"` // bytes from it
}

// An exposing reports on an exposed name: its sessions, its streams and its failed requests.
type exposing struct {
	o        *exposeOptions
	w        io.Writer
	own      func() []identity.Entry // the keys and CAs that are used
	renew    func()                  // looks at the files of these; may be nil
	json     bool
	terminal bool // the line of the progress is rewritten in its place

	reported  map[int]string // the last event of each session
	connected bool           // there was a session, ever
	line      string         // the progress that was shown last
	shown     time.Time      // when
	failed    time.Time      // of the last line about failed requests
	renewed   time.Time      // when renew was called last

	mu       sync.Mutex // guards what follows
	in, out  int64      // bytes of streams that have ended
	failures int64      // requests that failed and are not reported yet
	last     exposeEvent
}

func newExposing(w io.Writer, o *exposeOptions) *exposing {
	x := &exposing{o: o, w: w, json: o.output == "json", reported: map[int]string{}}
	if c, ok := w.(*cleanWriter); ok {
		x.terminal = c.color && !x.json
	}
	return x
}

// event writes e as JSON, or the same as a line of text.
func (x *exposing) event(e exposeEvent, format string, args ...any) {
	if x.json {
		e.Time, e.Name = time.Now().UTC(), x.o.name
		if b, err := json.Marshal(&e); err == nil {
			_, _ = x.w.Write(append(escapeJSON(b), '\n'))
		}
		return
	}
	text := printable(fmt.Sprintf(format, args...)) + "\n"
	if e.Hint != "" {
		text += "  " + printable(e.Hint) + "\n"
	}
	if x.terminal {
		text = string(markLine) + text
		x.line = "" // it has to be written again
	}
	_, _ = io.WriteString(x.w, text)
}

// begin prints what is exposed, and how to reach it.
func (x *exposing) begin() {
	name, port := x.o.split()
	host := strings.Replace(name, "*.", "www.", 1)
	target := "https://" + host + "/"
	if port == 0 {
		port = 443
	} else if port != 443 {
		target = "https://" + net.JoinHostPort(host, strconv.Itoa(port)) + "/"
	}
	command := fmt.Sprintf("curl --connect-to %s:%d:%s %s", host, port, x.o.via[0], target)
	x.event(exposeEvent{Event: "starting", To: x.o.to, Via: x.o.via, Command: command}, "exposing %s as %s on %s", x.o.to, x.o.name, strings.Join(x.o.via, " and "))
	if x.json {
		return
	}
	callers := "those that the gateway's policies allow"
	if len(x.o.allow) > 0 {
		callers = strings.Join(x.o.allow, ", ")
	}
	_, _ = fmt.Fprintf(x.w, "callers: %s\nto reach it, where it speaks HTTPS: %s\ninterrupt to stop\n", printable(callers), printable(command))
}

// end prints that the command has stopped.
func (x *exposing) end() {
	x.event(exposeEvent{Event: "stopped"}, "stopped")
}

// A sessionReport describes the state of one session.
type sessionReport struct {
	event  string
	text   string
	reason string
	err    string
	hint   string
	never  bool // a new attempt fails, too, until the configuration of one side changes
	taken  bool // the name belongs to another owner
	shared bool // other connectors have the name, too
}

// look reports what has changed in the sessions. It returns an error if no gateway will ever
// accept the name.
func (x *exposing) look(sessions []reverse.SessionState) error {
	var refused *sessionReport // by a gateway that will not change its mind
	var gateway string
	hope := len(sessions) == 0
	for i := range sessions {
		s := &sessions[i]
		n := x.report(s)
		x.connected = x.connected || s.Connected && n.event != "refused"
		switch {
		case n.never && (n.taken || !x.connected): // policies that let us in once may do so again
			if refused == nil {
				refused, gateway = &n, s.Gateway
			}
		case !errors.Is(s.Err, reverse.ErrSameReplica):
			hope = true
		}
		if key := n.event + withoutDigits(n.hint); n.event != "" && x.reported[i] != key {
			x.reported[i] = key
			x.event(exposeEvent{Event: n.event, Gateway: s.Gateway, Reason: n.reason, Error: n.err, Hint: n.hint, Shared: n.shared}, "%s: %s", s.Gateway, n.text)
		}
	}
	if hope || refused == nil {
		return nil
	}
	return &cliError{err: fmt.Errorf("no gateway takes %q: %s: %s", x.o.name, gateway, refused.text), hint: refused.hint, code: exitFailed}
}

// withoutDigits returns a hint without what changes of it with each second.
func withoutDigits(hint string) string {
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, hint)
}

// report returns the report on s. Without an event there is nothing to report.
func (x *exposing) report(s *reverse.SessionState) sessionReport {
	if s.Connected {
		for i := range s.Names {
			r := &s.Names[i]
			if r.Reason == "" {
				continue
			}
			n := sessionReport{event: "refused", reason: string(r.Reason), err: r.Error, never: true, taken: r.Taken, text: fmt.Sprintf("the gateway refuses %s: %s", r.Name, r.Error)}
			switch {
			case r.Taken:
				n.hint = "take another name, or the credentials of its owner; \"culvert connectors\" at the gateway says whose it is"
			case r.Reason == tunnel.Denied:
				n.hint = fmt.Sprintf("the gateway needs a policy with verb: register for %s and %s", r.Name, x.identity())
			}
			return n
		}
		if s.Draining {
			return sessionReport{event: "lost", text: "the gateway is about to stop"}
		}
		n := sessionReport{event: "session", text: x.o.name + " is registered"}
		if slices.ContainsFunc(s.Names, func(r reverse.Result) bool { return r.Shared }) {
			n.shared = true
			n.hint = "another connector with the same identity has it, too: each of them gets a part of the requests; \"culvert connectors\" at the gateway lists them"
		}
		return n
	}
	if s.Err == nil || errors.Is(s.Err, reverse.ErrSameReplica) {
		return sessionReport{}
	}
	n := sessionReport{event: "waiting", err: s.Error, reason: string(tunnel.ReasonOf(s.Err))}
	n.hint, n.never = x.sessionHint(s.Err), reverse.Permanent(s.Err)
	n.text = "no session: " + s.Error
	if !n.never {
		n.text += "; trying again"
	}
	return n
}

const hintRemoved = "the gateway does not accept the identity of this device: if \"culvert devices\" there does not list it, get a new token and run culvert join --replace"

// identity returns who the gateway takes this connector for, as far as that is known here.
func (x *exposing) identity() string {
	if x.own != nil {
		for _, entry := range x.own() {
			for _, end := range entry.Ends {
				if end.Kind == identity.KindKey {
					return end.Of
				}
			}
		}
	}
	return "the identity in the token"
}

// sessionHint returns what to do about a session that can't be opened, and "" if waiting helps.
func (x *exposing) sessionHint(err error) string {
	var (
		unknown x509.UnknownAuthorityError
		invalid x509.CertificateInvalidError
		host    x509.HostnameError
		plain   tls.RecordHeaderError
		op      *net.OpError
		refused *tunnel.Error
	)
	switch {
	case isProhibited(err):
		return "the name in --via leads to this machine itself, or to its link: write the address in place of the name, with --server-name NAME"
	case errors.As(err, &unknown):
		return "name the CA of the gateway's certificate with --ca FILE"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Sprintf("the clock of this machine says %s: if it is wrong, set it: timedatectl set-ntp true, or date -s; if it is right, the gateway needs a new certificate", time.Now().UTC().Format(time.RFC3339))
	case errors.As(err, &host):
		return "give --server-name NAME with a name of the gateway's certificate, or --gateway-id ID with its SPIFFE ID"
	case errors.As(err, &plain):
		return "the gateway does not speak TLS there: is --via a listener with tls?"
	case errors.As(err, &op) && op.Op == "remote error" && strings.Contains(op.Err.Error(), "unrecognized name"):
		return "the gateway has no listener that ends TLS for this name: give one that it has with --server-name NAME"
	case errors.As(err, &op) && op.Op == "remote error" && strings.Contains(op.Err.Error(), "no application protocol"):
		return x.protocolHint()
	case errors.As(err, &op) && op.Op == "remote error" && x.o.cert == "" && x.o.joined == nil:
		return "the gateway's listener asks for a client certificate: give one with --cert and --key"
	case errors.As(err, &op) && op.Op == "remote error":
		if hint := x.outOfTime(time.Now()); hint != "" {
			return hint
		}
		if x.o.joined != nil {
			return hintRemoved
		}
		return "the gateway does not accept the certificate: its listener has to trust the CA that signed --cert, and by its clock the certificate has to be valid; the gateway's log says what is wrong"
	case !errors.As(err, &refused):
		return x.dialHint(err)
	}
	switch refused.Reason {
	case tunnel.NoAuth:
		return "give --cert and --key, or --token-file, as the gateway's listener asks for"
	case tunnel.Denied, tunnel.NotExposed:
		if x.o.joined != nil {
			return hintRemoved
		}
		return "the gateway does not know you: give --cert and --key, or --token-file, as its listener asks for"
	case tunnel.BadMethod:
		return x.protocolHint()
	case tunnel.NoRoute, tunnel.Unsupported, tunnel.BadRequest:
		return "is --via a listener of a culvert gateway that ends TLS and takes " + oneOf(exposeProtocols) + "?"
	}
	return x.dialHint(err)
}

// protocolHint says what to do about a listener that takes other protocols.
func (x *exposing) protocolHint() string {
	return fmt.Sprintf("the gateway's listener does not take %s there: add it to protocols of its tls, or choose another one with --protocol", x.o.protocol)
}

// isProhibited reports whether err is about an address that is dialed only where it is written
// itself, such as 127.0.0.1.
func isProhibited(err error) bool {
	for err != nil {
		if e, ok := err.(*tunnel.Error); ok && e.Reason == tunnel.Prohibited {
			return true
		}
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			return slices.ContainsFunc(many.Unwrap(), isProhibited)
		}
		err = errors.Unwrap(err)
	}
	return false
}

// dialHint returns what to do about a gateway that can't be reached, and "" if waiting helps.
func (x *exposing) dialHint(err error) string {
	var lookup *net.DNSError
	switch {
	case errors.As(err, &lookup) && lookup.IsNotFound:
		return "correct --via, or have DNS answer it"
	case errors.As(err, &lookup):
		return "the DNS server of this machine has to answer it: see /etc/resolv.conf, or resolvectl status"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "start the gateway, or correct the address and port of --via"
	case timedOut(err) && x.o.protocol == "connect-h3":
		return "the gateway needs a listener at udp://, and firewalls have to let UDP through: --protocol connect-h2 uses TCP"
	case timedOut(err):
		return "correct --via, or have the firewalls let TCP to that port through"
	}
	return ""
}

// outOfTime returns what to do about an own certificate that is not valid at a time, "" where it is.
func (x *exposing) outOfTime(now time.Time) string {
	if x.own == nil {
		return ""
	}
	for _, entry := range x.own() {
		for _, end := range entry.Ends {
			if end.Kind == identity.KindKey && (now.Before(end.NotBefore) || now.After(end.NotAfter)) {
				return fmt.Sprintf("the certificate of %q is valid from %s to %s, and the clock of this machine says %s: set the clock, or get a new certificate", end.Of, end.NotBefore.UTC().Format(time.RFC3339), end.NotAfter.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
			}
		}
	}
	return ""
}

// observe records how a request has ended. The gateway calls it.
func (x *exposing) observe(o *tunnel.Outcome) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if o.Carried() {
		x.in += o.BytesIn
		x.out += o.BytesOut
		return
	}
	x.failures++
	x.last = exposeEvent{Reason: string(o.Reason)}
	if o.Err != nil {
		x.last.Error = clipError(o.Err.Error())
	}
	switch {
	case isProhibited(o.Err):
		x.last.Hint = "the name in --to leads to this machine itself, or to its link: write the address in its place, as in --to 127.0.0.1:8443"
	case o.Reason == tunnel.LookupError:
		x.last.Hint = "correct the name in --to " + x.o.to + ", or have the DNS server of this machine answer it"
	case o.Reason == tunnel.DialFailed, o.Reason == tunnel.DialTimeout:
		x.last.Hint = "does the service listen at " + x.o.to + "?"
	}
}

// clipError shortens an error at its beginning: why is at the end.
func clipError(s string) string {
	const most = 300
	if len(s) <= most {
		return s
	}
	return "..." + s[len(s)-most:]
}

// progress reports how many sessions and streams there are, and how many bytes they have carried. in
// and out are the bytes of open streams.
func (x *exposing) progress(sessions []reverse.SessionState, in, out int64) {
	open, streams := 0, 0
	for i := range sessions {
		s := &sessions[i]
		if s.Connected && !slices.ContainsFunc(s.Names, func(r reverse.Result) bool { return r.Reason != "" }) {
			open++
		}
		streams += s.Streams
	}
	now := time.Now()
	x.mu.Lock()
	in, out = in+x.in, out+x.out
	failures, last := x.failures, x.last
	if failures > 0 && now.Sub(x.failed) >= refusalEvery {
		x.failures, x.failed = 0, now
	} else {
		failures = 0
	}
	x.mu.Unlock()
	if failures > 0 {
		last.Event, last.Count = "failed-request", failures
		x.event(last, "%s, the last one: %s", plural(int(failures), "failed request"), last.Error)
	}
	line := fmt.Sprintf("%d of %s, %s, %s to the service, %s from it", open, plural(len(sessions), "session"), plural(streams, "stream"), humanBytes(in), humanBytes(out))
	if line == x.line || !x.terminal && now.Sub(x.shown) < progressEvery {
		return
	}
	if x.terminal {
		_, _ = io.WriteString(x.w, string(markLine)+string(markCut)+line+string(markWrap))
	} else if !x.shown.IsZero() { // at the beginning there is nothing to say
		x.event(exposeEvent{Event: "progress", Sessions: &open, Streams: &streams, In: &in, Out: &out}, "%s", line)
	}
	x.line, x.shown = line, now
}
