package ssh

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

const (
	maxForwarded = 1000 // channels that the gateway has open to one client
	maxForwards  = 1000 // names of one connection
	maxNotes     = 32   // refusals that a console is told of, and lines that it has not taken

	costRefusedName = 4 // of a registration, beside that of its request

	// A client that serves names is asked for a sign of life after servingQuiet, and given
	// up after servingDead, as a reverse session is.
	servingQuiet = 3 * time.Second
	servingDead  = 9 * time.Second
)

// A tcpipForward is what the requests tcpip-forward and cancel-tcpip-forward say, RFC 4254
// section 7.1.
type tcpipForward struct {
	Host string
	Port uint32
}

// A forwardedTCPIP is what the open of a channel of the type forwarded-tcpip says.
type forwardedTCPIP struct {
	Host       string // as the client has written it
	Port       uint32
	Originator string
	OriginPort uint32
}

// A forwardKey is what one connection may serve once.
type forwardKey struct {
	name tunnel.Pattern
	port uint16
}

// A forward is a name that the client serves.
type forward struct {
	host string // as the client has written it
	lost string // why it is not registered at the moment; "" where it is
}

// A served is what a client serves by names of its own, "ssh -R". It is the reverse.Session of
// its connection.
type served struct {
	s *session

	killed  atomic.Pointer[tunnel.Reason]
	open    atomic.Int64 // channels, and those that are being opened
	in, out atomic.Int64 // bytes from and to the client
	moved   atomic.Int64 // when some last were, of mux.Clock

	mu       sync.Mutex          // guards what follows
	attached *reverse.Attachment // nil before the first name
	checked  *sshkeys.Grant      // by which forwards were last looked at
	forwards map[forwardKey]*forward
	order    []forwardKey // of forwards
	refused  []string     // the last few lines about names that were refused
	consoles map[chan string]struct{}
}

var (
	_ reverse.AttachedSession = (*served)(nil)
	_ tunnel.Stream           = (*forwardedStream)(nil)
)

// isServing reports whether the client serves a name.
func (v *served) isServing() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.forwards) > 0
}

// A refusedName is why a name is not registered, with what the client hears of it.
type refusedName struct {
	err  error
	text string
	told bool // the Outcome was
}

func refuseName(r tunnel.Reason, format string, args ...any) *refusedName {
	err := tunnel.Refusef(r, "ssh: "+format, args...)
	return &refusedName{err: err, text: strings.TrimPrefix(err.Error(), "ssh: ")}
}

// registrable returns the name in the bind address of a tcpip-forward.
func registrable(host string) (tunnel.Name, *refusedName) {
	const hint = "name the service, as in -R NAME:443:localhost:8443"
	trimmed := strings.Trim(host, "[]")
	switch addr, err := netip.ParseAddr(trimmed); {
	case host == "" || host == "*" || err == nil && addr.IsUnspecified():
		return tunnel.Name{}, refuseName(tunnel.BadRequest, "a wildcard or an empty address can't be registered: %s", hint)
	case err == nil || strings.EqualFold(host, "localhost"):
		return tunnel.Name{}, refuseName(tunnel.BadRequest, "%q is an address of a host and can't be registered: %s", tunnel.Clip(host), hint)
	case strings.Contains(host, "*"):
		return tunnel.Name{}, refuseName(tunnel.BadRequest, "%q is a wildcard and can't be registered: %s", tunnel.Clip(host), hint)
	}
	name, err := tunnel.ParseName(host)
	if err != nil {
		return tunnel.Name{}, refuseName(tunnel.BadRequest, "%q is not a name: %s", tunnel.Clip(host), hint)
	}
	return name, nil
}

// register answers a tcpip-forward.
func (v *served) register(r *ssh.Request) bool {
	var asked tcpipForward
	if ssh.Unmarshal(r.Payload, &asked) != nil {
		asked = tcpipForward{}
	}
	port, no := v.join(&asked)
	if no == nil {
		var answer []byte
		if asked.Port == 0 {
			answer = ssh.Marshal(struct{ Port uint32 }{uint32(port)})
		}
		return r.Reply(true, answer) == nil
	}
	if !v.s.spend(costRefusedName) {
		return false
	}
	v.note(fmt.Sprintf("%s is refused: %s: %s", target(asked.Host, asked.Port), tunnel.ReasonOf(no.err), no.text), true)
	if h, ok := v.s.h.(tunnel.Refuser); ok && !no.told {
		req := v.newRequest()
		req.Name, req.Port = tunnel.Name{}, 0
		if name, err := tunnel.ParseName(asked.Host); err == nil {
			req.Name, req.Port = name, uint16(min(asked.Port, 1<<16-1))
		}
		h.Refused(req, no.err)
	}
	return r.Reply(false, nil) == nil
}

// target is what people are told of a name and port that a client has asked for.
func target(host string, port uint32) string {
	if n, err := tunnel.ParseName(host); err == nil {
		host = n.String()
	} else {
		host = fmt.Sprintf("%q", tunnel.Clip(host))
	}
	return fmt.Sprintf("%s:%d", host, port)
}

// newRequest returns a request of the client for a session.
func (v *served) newRequest() *tunnel.Request {
	req := v.s.c.NewRequest(Name)
	req.Start = time.Now()
	req.Peer = v.s.peer()
	req.Name, req.Port = reverse.Name, 443
	return req
}

// join registers what was asked for, and returns its port.
func (v *served) join(asked *tcpipForward) (uint16, *refusedName) {
	name, no := registrable(asked.Host)
	if no != nil {
		return 0, no
	}
	if asked.Port > 1<<16-1 {
		return 0, refuseName(tunnel.BadRequest, "%d is not a port", asked.Port)
	}
	sessions := v.s.p.Sessions
	if sessions == nil {
		return 0, refuseName(tunnel.Unsupported, "this gateway registers no names by SSH")
	}
	grant, err := v.s.current()
	if err != nil {
		return 0, &refusedName{err: err, text: "your key is no longer accepted"}
	}
	k := forwardKey{tunnel.Pattern{Suffix: name}, uint16(asked.Port)}
	if k.port == 0 {
		k.port = sessions.FreePort(k.name)
	}
	if !grant.Limits.MayListen(name.String(), k.port) {
		no := refuseName(tunnel.Denied, "the key %q is not for %s:%d: see its permitlisten", grant.Peer.ID, name, k.port)
		no.text = fmt.Sprintf("your key is not for it with port %d: see its permitlisten", k.port)
		return 0, no
	}
	if no := v.add(k, asked.Host); no != nil {
		return 0, no
	}
	a, no := v.attach()
	if no != nil {
		v.remove(k)
		return 0, no
	}
	if err := a.Register(reverse.Registration{Name: k.name, Port: k.port}); err != nil {
		v.remove(k)
		return 0, &refusedName{err: err, text: reverse.PublicError(err)}
	}
	if !v.has(k) { // recheck has taken it meanwhile
		a.Unregister(k.name, k.port)
		return 0, refuseName(tunnel.NoAuth, "your key is no longer accepted")
	}
	v.note(target(name.String(), uint32(k.port))+" is registered", false)
	v.s.hurry()
	return k.port, nil
}

// add lists a name, before it is registered: streams may come at once.
func (v *served) add(k forwardKey, host string) *refusedName {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.forwards[k] != nil:
		return refuseName(tunnel.BadRequest, "this connection has registered it before")
	case len(v.forwards) >= maxForwards:
		return refuseName(tunnel.Overload, "this connection has registered %d names, the limit", maxForwards)
	case v.forwards == nil:
		v.forwards = make(map[forwardKey]*forward)
	}
	v.forwards[k] = &forward{host: host}
	v.order = append(v.order, k)
	return nil
}

func (v *served) remove(k forwardKey) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.forwards[k] == nil {
		return false
	}
	delete(v.forwards, k)
	for i := range v.order {
		if v.order[i] == k {
			v.order = append(v.order[:i], v.order[i+1:]...)
			break
		}
	}
	return true
}

func (v *served) has(k forwardKey) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.forwards[k] != nil
}

// attachment returns nil before the first name.
func (v *served) attachment() *reverse.Attachment {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.attached
}

// attach lists the connection among the sessions of connectors, before its first name.
func (v *served) attach() (*reverse.Attachment, *refusedName) {
	if a := v.attachment(); a != nil {
		return a, nil
	}
	req := v.newRequest()
	req.Accept = func() (tunnel.Stream, error) { return listedConn{v.s.conn}, nil }
	req.Refuse = func(error) {}
	a, err := v.s.p.Sessions.Attach(req, v, string(v.s.ssh.ClientVersion()))
	if err != nil {
		return nil, &refusedName{err: err, text: connect.Answer(req, err).Text, told: true}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.attached = a
	return a, nil
}

// A listedConn is a connection as the Stream of its session.
type listedConn struct{ *conn }

// CloseWrite implements tunnel.Stream.
func (listedConn) CloseWrite() error { return nil }

// cancel answers a cancel-tcpip-forward. Streams go on.
func (v *served) cancel(r *ssh.Request) bool {
	var asked tcpipForward
	ok := false
	if ssh.Unmarshal(r.Payload, &asked) == nil && asked.Port < 1<<16 {
		if name, no := registrable(asked.Host); no == nil {
			k := forwardKey{tunnel.Pattern{Suffix: name}, uint16(asked.Port)}
			if ok = v.remove(k); ok {
				v.attachment().Unregister(k.name, k.port)
				v.note(target(asked.Host, asked.Port)+" is no longer registered", false)
			}
		}
	}
	return r.Reply(ok, nil) == nil
}

// recheck takes the names that the client's key is no longer for, and all where it is not
// accepted any more.
func (v *served) recheck() {
	if !v.isServing() {
		return
	}
	grant, err := v.s.current()
	v.mu.Lock()
	if err == nil && grant == v.checked {
		v.mu.Unlock()
		return
	}
	v.checked = grant
	var gone []forwardKey
	for k := range v.forwards {
		if err != nil || !grant.Limits.MayListen(k.name.Suffix.String(), k.port) {
			gone = append(gone, k)
		}
	}
	a := v.attached
	v.mu.Unlock()
	why := err
	if why == nil {
		why = tunnel.Refusef(tunnel.Denied, "ssh: the key %q is not for it any more: see its permitlisten", grant.Peer.ID)
	}
	for _, k := range gone {
		if v.remove(k) && a != nil {
			a.Withdraw(k.name, k.port, why)
			v.note(target(k.name.Suffix.String(), uint32(k.port))+" is no longer registered: your key is not for it any more", true)
		}
	}
	if err != nil {
		v.s.endUnused(err)
	}
}

// end takes all names away, once the connection has ended for the reason why.
func (v *served) end(why error) {
	a := v.attachment()
	if a == nil {
		return
	}
	e := tunnel.End{Reason: tunnel.Done, In: v.in.Load(), Out: v.out.Load()}
	refusal, refused := errors.AsType[*tunnel.Error](why)
	switch killed := v.killed.Load(); {
	case killed != nil:
		e.Reason = *killed
	case refused:
		e.Reason, e.Err = refusal.Reason, why
	case errors.Is(why, errDead):
		e.Reason, e.Err = tunnel.Idle, why
	case why == nil:
		if err := v.s.ssh.Wait(); errors.Is(err, syscall.ECONNRESET) {
			e.Reason, e.Err, e.ByClient = tunnel.Reset, err, true
		}
	}
	a.End(e)
}

// Streams implements reverse.Session.
func (v *served) Streams() int { return int(v.open.Load()) }

// Security implements reverse.Session.
func (*served) Security() tunnel.Security { return tunnel.Mutual }

// Progress implements tunnel.Carrier.
func (v *served) Progress() (in, out int64, moved time.Time) {
	return v.in.Load(), v.out.Load(), time.Now().Add(-time.Duration(mux.Clock() - v.moved.Load()))
}

// Kill implements tunnel.Carrier.
func (v *served) Kill(why tunnel.Reason) {
	v.killed.CompareAndSwap(nil, &why)
	v.s.end(errKilled)
}

// NameChanged implements reverse.AttachedSession.
func (v *served) NameChanged(reg *reverse.Registration, err error) {
	text := ""
	if err != nil {
		text = string(tunnel.ReasonOf(err)) + ": " + reverse.PublicError(err)
	}
	v.mu.Lock()
	f := v.forwards[forwardKey{reg.Name, reg.Port}]
	if f != nil {
		f.lost = text
	}
	v.mu.Unlock()
	switch at := target(reg.Name.Suffix.String(), uint32(reg.Port)); {
	case f == nil:
	case err != nil:
		v.note(at+" is no longer registered: "+text, false)
	default:
		v.note(at+" is registered again", false)
	}
}

// Draining implements reverse.AttachedSession.
func (v *served) Draining() {
	v.note("The gateway is about to stop: connect again for another one.", false)
}

// note tells the consoles a line. A refusal is told to later ones, too.
func (v *served) note(line string, refusal bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if refusal {
		v.refused = append(v.refused[max(0, len(v.refused)-maxNotes+1):], line)
	}
	for c := range v.consoles {
		select {
		case c <- line:
		default: // which nobody reads
		}
	}
}

// watch returns what there is to say, and where more lines will come until unwatch.
func (v *served) watch() (lines []string, more chan string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range v.order {
		f, at := v.forwards[k], target(k.name.Suffix.String(), uint32(k.port))
		if f.lost != "" {
			lines = append(lines, at+" is not registered: "+f.lost)
			continue
		}
		lines = append(lines, at+" is registered")
	}
	lines = append(lines, v.refused...)
	more = make(chan string, maxNotes)
	if v.consoles == nil {
		v.consoles = make(map[chan string]struct{})
	}
	v.consoles[more] = struct{}{}
	return lines, more
}

func (v *served) unwatch(c chan string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.consoles, c)
}
