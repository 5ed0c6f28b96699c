package admin

import (
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"culvert.dev/tunnel"
)

// Limits of what a log line takes from others, in bytes after escaping.
const (
	maxField  = tunnel.MaxNameLen                   // a name, an identity, the ALPN list
	maxTarget = tunnel.MaxNameLen + len("[]:65535") // a name or address with its port
	maxError  = 1024                                // an error, which may quote several of them
	maxTried  = 16                                  // attempts
)

// DefaultOverloads is how many overload refusals are logged each second.
const DefaultOverloads = 10

// An AccessLog writes one line for each Outcome.
//
// A tunnel's line and a refusal that is the client's own doing are of level
// info, a refusal that is ours to mend is a warning, and a client that left
// without a byte is debug. Durations are nanoseconds in JSON, as in all of
// log/slog. Fields without a value are left out.
//
// Overload is what happens when there is too much of everything, so of those
// refusals only the first few in a second have a line; the second's end brings
// one with the number of the others.
type AccessLog struct {
	Log       *slog.Logger // nil discards. Its handler should be a Handler, and the writer of that an AsyncWriter
	Overloads int          // overload lines a second; 0 means DefaultOverloads

	mu         sync.Mutex  // guards what follows
	second     *time.Timer // runs while the second of the first overload line lasts
	written    int         // overload lines in this second
	suppressed int         // and those that were not written
}

// Observe writes o's line. It does not block if the Log doesn't.
func (l *AccessLog) Observe(o *tunnel.Outcome) {
	if l.Log == nil || o.Reason == tunnel.Overload && !l.admit() {
		return
	}
	level, msg := slog.LevelInfo, "tunnel"
	switch {
	case o.Carried():
	case o.Reason == tunnel.NoHello:
		level, msg = slog.LevelDebug, "left"
	case o.Reason == tunnel.Gone:
		msg = "left"
	case ours(o):
		level, msg = slog.LevelWarn, "refused"
	default:
		msg = "refused"
	}
	if h, ok := l.Log.Handler().(*Handler); ok {
		h.write(level, msg, o)
		return
	}
	emit := l.Log.Info
	switch level {
	case slog.LevelDebug:
		emit = l.Log.Debug
	case slog.LevelWarn:
		emit = l.Log.Warn
	}
	emit(msg, "", (*line)(o))
}

// A line is an Outcome whose fields are made when a handler wants them: a level
// that is off should cost nothing.
type line tunnel.Outcome

// LogValue implements slog.LogValuer. Under an empty key a group's fields
// stand by themselves.
func (l *line) LogValue() slog.Value {
	var a attrWriter
	fields((*tunnel.Outcome)(l), &a)
	return slog.GroupValue(a.attrs...)
}

// Flush writes the number of suppressed lines now. Call it before the log is
// closed.
func (l *AccessLog) Flush() {
	l.mu.Lock()
	n := l.suppressed
	if l.second != nil {
		l.second.Stop()
		l.second = nil
	}
	l.written, l.suppressed = 0, 0
	l.mu.Unlock()
	if n > 0 {
		l.Log.Warn("refusals not logged", "reason", string(tunnel.Overload), "suppressed", n)
	}
}

// admit reports whether one more overload line may be written now.
func (l *AccessLog) admit() bool {
	most := l.Overloads
	if most == 0 {
		most = DefaultOverloads
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.second == nil {
		l.second = time.AfterFunc(time.Second, l.Flush)
	}
	if l.written >= most {
		l.suppressed++
		return false
	}
	l.written++
	return true
}

// ours reports whether a refusal is the gateway's or the service's fault, and
// not the client's.
func ours(o *tunnel.Outcome) bool {
	switch o.Reason {
	case tunnel.Overload, tunnel.Insecure, tunnel.NoEndpoint, tunnel.LookupError, tunnel.LookupTime,
		tunnel.DialFailed, tunnel.DialTimeout, tunnel.Internal:
		return true
	case tunnel.Prohibited, tunnel.Loop:
		return o.Service != "" // a route leads there; without one the client asked for it
	}
	return false
}

// fields gives w the fields of o. The comments are the page docs/reference/log.md.
func fields(o *tunnel.Outcome, w fieldWriter) {
	text := func(key, value string, most int) {
		if value != "" {
			w.text(key, clean(value, most))
		}
	}
	took := func(key string, d time.Duration) {
		if d != 0 {
			w.duration(key, d.Round(time.Microsecond))
		}
	}
	if o.ID != 0 {
		w.unsigned("id", o.ID) // number of the request in this process
	}
	text("proto", o.Proto, maxField)       // protocol of the client: sni, connect, connect-h2, connect-h3, connect-udp, hbone, socks5, ssh, websocket, proxy, quic, tcp, udp, or dial for the process itself; tls where TLS that ends at the gateway failed
	text("listener", o.Listener, maxField) // listener that accepted the connection, as configured
	if o.Source.IsValid() {
		w.address("source", o.Source, maxField) // the client's address; of a Unix socket, `unix:uid=1000,pid=4711` for the user and the number of the process that connected
	} else if key := "source"; o.Process != nil {
		text(key, o.Process.String(), maxField)
	}
	text("target", o.Target, maxTarget)       // name and port that the client asked for
	text("service", o.Service, maxField)      // service that the name led to
	text("endpoint", o.Endpoint, 2*maxTarget) // endpoint that was reached: a name and an address
	if o.Insecure {
		text("insecure", "true", maxField) // true where plaintext was permitted over a transport without mutual TLS
	}
	text("reason", string(o.Reason), maxField) // why the request was refused or the tunnel ended
	if o.Err != nil {
		text("err", o.Err.Error(), maxError) // what happened, in words
	}
	if tried := attempts(o); tried != nil {
		w.list("attempts", tried) // each address that was dialed and the result, if one failed
	}
	text("peer", o.Peer.ID, maxField)            // the client's verified identity
	text("peer_method", o.Peer.Method, maxField) // how the client was verified: basic, bearer, jwt, mtls or unix
	if actor := actorOf(&o.Peer); actor != nil {
		text("actor", actor.ID, maxField)            // identity of the client certificate beside a user or a token, or of the gateway that stated the peer
		text("actor_method", actor.Method, maxField) // how the actor was verified
		if earlier := actors(o.Peer)[1:]; len(earlier) > 0 {
			text("earlier_actors", join(earlier), maxError) // gateways on the way before the actor, as it states them, the nearest first
		}
	}
	if p := o.Policy; p != nil {
		text("policy", p.Policy, maxField)        // policy that permitted or denied the request
		text("policy_origin", p.Origin, maxField) // file and line, or object, that has the policy
		if p.Admitted < p.Endpoints {
			text("policy_endpoints", strconv.Itoa(p.Admitted)+" of "+strconv.Itoa(p.Endpoints), maxField) // endpoints that policies admit the caller to, where it is not all
		}
		if dry := p.DryRun; dry != nil {
			text("policy_dry_run", decided(dry.Allowed)+" by "+dry.Policy, maxField) // what the policies in dry run would have done
		}
	}
	text("alpn", join(o.ALPN), maxField) // ALPN protocols that the client offers inside TLS
	if said := o.Unverified; said != nil {
		text("trace", said.Trace, maxField)         // trace context that an HBONE client sent, unverified
		text("baggage", said.Baggage, maxError)     // baggage that an HBONE client sent, unverified
		text("forwarded", said.Forwarded, maxField) // Forwarded header that an HBONE client sent, unverified
	}
	if o.Carried() {
		w.number("bytes_in", o.BytesIn)   // bytes from the client to the service
		w.number("bytes_out", o.BytesOut) // bytes from the service to the client
	}
	took("waited", o.Waited) // time from accept to the complete request
	took("dialed", o.Dialed) // time from the complete request to the answer to the client
	took("lasted", o.Lasted) // time from accept to the end
}

// actorOf returns the Actor of a peer; nil for nobody.
func actorOf(p *tunnel.Peer) *tunnel.Peer {
	if p.Auth == nil {
		return nil
	}
	return p.Auth.Actor
}

// decided says what a policy has decided.
func decided(allowed bool) string {
	if allowed {
		return "allowed"
	}
	return "denied"
}

// join puts commas between protocol names, and stops when there is more than
// a line will show: a client may offer thousands.
func join(names []string) string {
	if len(names) == 1 {
		return names[0]
	}
	var b strings.Builder
	for i, n := range names {
		if b.Len() > maxField {
			break
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(n[:min(len(n), maxField)])
	}
	return b.String()
}

// attempts says what happened at each address, unless the first one worked.
func attempts(o *tunnel.Outcome) []string {
	failed := false
	for i := range o.Attempts {
		failed = failed || o.Attempts[i].Err != nil
	}
	if !failed {
		return nil
	}
	tried := make([]string, 0, min(len(o.Attempts), maxTried))
	for _, a := range o.Attempts[:min(len(o.Attempts), maxTried)] {
		ep, how := a.Endpoint.String(), "ok"
		if a.Err != nil {
			// The address stands before it already.
			how = strings.TrimPrefix(a.Err.Error(), "dial "+ep+": ")
		}
		tried = append(tried, clean(ep, 2*maxTarget)+" after "+a.Took.Round(time.Microsecond).String()+": "+clean(how, maxField))
	}
	return tried
}

// actors returns the ids of the actors of p, the nearest first.
func actors(p tunnel.Peer) (ids []string) {
	const most = 8
	for at := p.Auth; at != nil && at.Actor != nil && len(ids) < most; at = at.Actor.Auth {
		ids = append(ids, at.Actor.ID)
	}
	return ids
}
