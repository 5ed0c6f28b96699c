package enroll

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/bundle"
	"culvert.dev/internal/invitation"
	"culvert.dev/tunnel"
)

// Settings are what an Authority signs by.
type Settings struct {
	Gateway   string // host:port, as devices reach the gateway
	Transport string // by which they ask it: one of invitation.Transports
	Key       string // of the Store, with a SPIFFE id of Trust: what the gateway shows there
	Trust     string // the own trust domain, of the Store
	CA        *tls.Certificate
	Lifetime  time.Duration // of a certificate; it never outlives the CA
	State     string        // the folder where devices and invitations are kept
}

const (
	// Skew is how far the clock of a device may be behind that of the authority.
	Skew = 5 * time.Minute

	maxDevices      = 10_000
	maxInvitations  = 1000
	maxUses         = 1000 // of a token
	maxCertificates = 8    // of a device, which have not expired
)

// An Authority signs certificates for devices. Its exported fields are set before its first
// use. It is safe for concurrent use.
type Authority struct {
	Store *identity.Store
	Log   *slog.Logger     // nil discards
	Time  func() time.Time // nil means time.Now

	mu       sync.Mutex // guards what follows
	settings Settings
	file     *invitation.File // of state; nil for none
	state    state
	failed   error // why the state can't be used; nil if it can

	server invitation.Server
}

// A Device is one that has joined, for people and programs.
type Device struct {
	Name    string    `json:"name"`
	ID      string    `json:"id"`
	Joined  time.Time `json:"joined"`
	Renewed time.Time `json:"renewed,omitzero"`
	Expires time.Time `json:"expires"` // of its last certificate
	Expired bool      `json:"expired,omitempty"`
}

func (a *Authority) log() *slog.Logger {
	if a.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return a.Log
}

func (a *Authority) now() time.Time {
	if a.Time != nil {
		return a.Time()
	}
	return time.Now()
}

// Use has the authority be what the settings say; nil means that there is none. An error says
// why no device can join.
func (a *Authority) Use(next *Settings) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if next == nil {
		next = &Settings{}
	}
	was := a.settings
	if next.State != was.State {
		a.close()
		a.state, a.failed = state{Version: stateVersion}, nil
		if next.State != "" {
			a.failed = a.load(next.State)
		}
	}
	a.settings = *next
	if was.Trust != "" && was.Trust != next.Trust {
		a.Store.Trust(was.Trust).Revoke()
	}
	a.publish()
	return a.failed
}

// usable returns why no device can join. It is called with a.mu held.
func (a *Authority) usable() error {
	switch {
	case a.settings.State == "":
		return errors.New("the configuration has no enrollment, by which this gateway gives devices an identity")
	case a.failed != nil:
		return a.failed
	case a.now().After(a.settings.CA.Leaf.NotAfter):
		return fmt.Errorf("the certificate of the authority has expired at %s", a.settings.CA.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return nil
}

// Invite returns a token by which devices may join until ttl is over: uses of them, each with
// the name, or a name that begins with what is before the "*" at its end. Their SPIFFE id is
// id, with the name in place of a "*" at its end; "" means "spiffe://DOMAIN/device/*".
func (a *Authority) Invite(name, id string, uses int, ttl time.Duration) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		return "", err
	}
	prefix, several := strings.CutSuffix(name, "*")
	if err := checkName(prefix + strings.Repeat("x", btoi(several))); err != nil {
		return "", err
	}
	if id == "" {
		id = "spiffe://" + a.settings.Trust + "/device/*"
	}
	domain, _, err := identity.ParseSPIFFEID(idOf(id, "x"))
	switch {
	case err != nil:
		return "", err
	case domain != a.settings.Trust:
		return "", fmt.Errorf("the id %q is of trust domain %q, and this authority signs for %q alone", clip(id), domain, a.settings.Trust)
	case uses < 1 || uses > maxUses:
		return "", fmt.Errorf("a token works once or up to %d times, and not %d times", maxUses, uses)
	case uses > 1 && (!several || !strings.HasSuffix(id, "*")):
		return "", errors.New("a token for several devices needs a name and an id that end with *: each device has its own")
	case several && !strings.HasSuffix(id, "*"):
		return "", errors.New("a name that ends with * needs an id that does: each device has its own")
	}
	leaf, _, err := a.own()
	if err != nil {
		return "", err
	}
	if slices.Contains(a.reserved(leaf), id) {
		return "", fmt.Errorf("the id %q is that of this gateway", clip(id))
	}
	t, err := invitation.New(invitation.Device, a.settings.Gateway, a.settings.Transport, leaf, ttl)
	if err != nil {
		return "", err
	}
	text, err := t.Text()
	if err != nil {
		return "", err
	}
	next := a.state
	next.Invitations = slices.DeleteFunc(slices.Clone(next.Invitations), func(i invited) bool { return i.Forgotten(time.Now()) })
	if len(next.Invitations) >= maxInvitations {
		return "", fmt.Errorf("there are %d invitations already", maxInvitations)
	}
	next.Invitations = append(next.Invitations, invited{Record: invitation.Record{Hash: invitation.HashOf(t.Secret), Expires: t.Expires}, Name: name, ID: id, Uses: uses})
	if err := a.save(next); err != nil {
		return "", err
	}
	return text, nil
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// idOf puts a name in place of a "*" at the end of an id.
func idOf(id, name string) string {
	if before, ok := strings.CutSuffix(id, "*"); ok {
		return before + name
	}
	return id
}

// own returns the certificate of the gateway, and the bundle of the trust domain.
func (a *Authority) own() (leaf *x509.Certificate, doc []byte, err error) {
	cert, err := a.Store.Key(a.settings.Key).Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("enrollment.key: %w", err)
	}
	b, err := a.Store.Trust(a.settings.Trust).Bundle()
	if err != nil {
		return nil, nil, fmt.Errorf("enrollment.trustDomain: %w", err)
	}
	doc, err = bundle.Marshal(b)
	return cert.Leaf, doc, err
}

// reserved are the ids that no device gets.
func (a *Authority) reserved(leaf *x509.Certificate) (all []string) {
	for _, u := range leaf.URIs {
		all = append(all, u.String())
	}
	return all
}

// ServeTunnel implements tunnel.Handler: it serves the stream of a device.
func (a *Authority) ServeTunnel(ctx context.Context, req *tunnel.Request) {
	a.Serve(ctx, req, req.Refuse)
}

// Serve is ServeTunnel, and refuses by refuse.
func (a *Authority) Serve(ctx context.Context, req *tunnel.Request, refuse func(error)) {
	a.mu.Lock()
	err := a.usable()
	a.mu.Unlock()
	if err != nil {
		refuse(tunnel.Refusef(tunnel.Denied, "enroll: %w", err))
		return
	}
	a.server.Serve(ctx, req, refuse, "enroll", func(r *bufio.Reader) (any, bool) {
		out, err := a.admit(r, req)
		if err != nil {
			a.log().Warn("a device got no certificate", "source", req.Source.String(), "peer", req.Peer.ID, "error", err.Error())
			return &answer{Version: version, Error: err.Error(), Removed: errors.Is(err, errRemoved)}, true
		}
		return out, false
	})
}

// admit reads the request of a device, and signs its certificate.
func (a *Authority) admit(r *bufio.Reader, req *tunnel.Request) (out *answer, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	var q request
	if _, err := invitation.ReadMessage(bufio.NewReader(io.LimitReader(r, maxRequest)), &q); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.usable(); err != nil {
		return nil, err
	}
	next := a.state
	next.Devices = slices.Clone(next.Devices)
	var d *device
	if len(q.Secret) > 0 {
		d, err = a.joining(&q, &next)
	} else {
		d, err = a.renewing(&q, &next, req)
	}
	if err != nil {
		return nil, err
	}
	key, err := keyOf(q.CSR)
	if err != nil {
		return nil, err
	}
	_, doc, err := a.own()
	if err != nil {
		return nil, errors.New("the gateway has no key or no bundle")
	}
	der, one, err := a.sign(d, key)
	if err != nil {
		return nil, err
	}
	d.Certificates = append(d.Certificates, *one)
	if err := a.save(next); err != nil {
		return nil, fmt.Errorf("it cannot be stored: %w", err)
	}
	if len(q.Secret) > 0 {
		a.log().Info("a device has joined", "device", d.Name, "id", d.ID, "source", req.Source.String())
	} else {
		a.log().Debug("renewed the certificate of a device", "device", d.Name, "id", d.ID)
	}
	out = &answer{Version: version, Name: d.Name, ID: d.ID, Chain: [][]byte{der}, Domain: a.settings.Trust, Bundle: doc}
	if ca := a.settings.CA; ca.Leaf.CheckSignatureFrom(ca.Leaf) != nil { // roots are in the bundle
		out.Chain = append(out.Chain, ca.Certificate...)
	}
	return out, nil
}

var (
	// errSecret is the answer to any secret that does not work.
	errSecret = errors.New("the token is not known here, was used already, or has expired")

	errRemoved = errors.New("no device has this certificate: it was removed, or it is of another authority; join again with a new token")
)

// joining adds the device of q, which has a secret, to next.
func (a *Authority) joining(q *request, next *state) (*device, error) {
	hash, now := invitation.HashOf(q.Secret), a.now()
	at := slices.IndexFunc(next.Invitations, func(i invited) bool { return i.Hash == hash })
	if at < 0 || !next.Invitations[at].Valid(now) {
		return nil, errSecret // others are told nothing of what else is wrong
	}
	if q.Version != version {
		return nil, fmt.Errorf("the request is of version %d, and this culvert knows version %d", q.Version, version)
	}
	next.Invitations = slices.Clone(next.Invitations)
	i := &next.Invitations[at]
	if i.Uses--; i.Uses <= 0 {
		i.Used = now.UTC()
	}
	prefix, several := strings.CutSuffix(i.Name, "*")
	name := i.Name
	if several {
		name = q.Name
		if err := checkName(name); err != nil {
			return nil, err
		}
		if !strings.HasPrefix(name, prefix) {
			return nil, fmt.Errorf("the invitation is for devices with names as %q, and not for %q: give a name with \"culvert join --name\"", i.Name, clip(name))
		}
	}
	id := idOf(i.ID, name)
	if before := slices.IndexFunc(next.Devices, func(d device) bool { return d.Name == name || d.ID == id }); before >= 0 {
		d := &next.Devices[before]
		d.Certificates = unexpired(d.Certificates, now)
		if len(d.Certificates) > 0 {
			return nil, fmt.Errorf("device %q has joined as %q already: to replace it, run \"culvert devices remove %s\" at the gateway first", d.Name, d.ID, d.Name)
		}
		next.Devices = slices.Delete(next.Devices, before, before+1)
	}
	leaf, _, err := a.own()
	switch {
	case err != nil:
		return nil, errors.New("the gateway has no key or no bundle")
	case slices.Contains(a.reserved(leaf), id):
		return nil, fmt.Errorf("the id %q is that of this gateway", id)
	case len(next.Devices) >= maxDevices:
		return nil, fmt.Errorf("there are %d devices already", maxDevices)
	}
	next.Devices = append(next.Devices, device{Name: name, ID: id, Joined: now.UTC()})
	return &next.Devices[len(next.Devices)-1], nil
}

// renewing returns the device of next that has shown its certificate to the gateway.
func (a *Authority) renewing(q *request, next *state, req *tunnel.Request) (*device, error) {
	if q.Version != version {
		return nil, fmt.Errorf("the request is of version %d, and this culvert knows version %d", q.Version, version)
	}
	if req.Peer.Method != "mtls" || req.Peer.Auth == nil || req.Peer.Auth.Actor != nil || req.TLS == nil || len(req.TLS.Chain) == 0 || req.TLS.Peer.ID != req.Peer.ID {
		return nil, errors.New("a certificate is renewed by mutual TLS with the one before, and none was shown")
	}
	serial := serialOf(req.TLS.Chain[0])
	at := slices.IndexFunc(next.Devices, func(d device) bool {
		return d.ID == req.Peer.ID && slices.ContainsFunc(d.Certificates, func(c issued) bool { return c.Serial == serial })
	})
	if at < 0 {
		return nil, errRemoved
	}
	d, now := &next.Devices[at], a.now()
	if d.Name != q.Name {
		return nil, fmt.Errorf("the certificate is that of device %q, and does not renew that of %q", d.Name, clip(q.Name))
	}
	d.Certificates = unexpired(d.Certificates, now)
	if len(d.Certificates) >= maxCertificates {
		return nil, fmt.Errorf("device %q has %d certificates that have not expired, limit %d", d.Name, len(d.Certificates), maxCertificates)
	}
	d.Renewed = now.UTC()
	return d, nil
}

func unexpired(all []issued, now time.Time) []issued {
	return slices.DeleteFunc(slices.Clone(all), func(c issued) bool { return now.After(c.NotAfter) })
}

func serialOf(c *x509.Certificate) string { return hex.EncodeToString(c.SerialNumber.Bytes()) }

// sign signs a certificate of d for a public key.
func (a *Authority) sign(d *device, key any) (der []byte, one *issued, err error) {
	id, err := url.Parse(d.ID)
	if err != nil {
		return nil, nil, err
	}
	number := make([]byte, 16)
	_, _ = rand.Read(number)
	number[0] = number[0]&0x7f | 0x40 // positive, and of 16 bytes
	now, ca := a.now(), a.settings.CA
	template := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(number),
		Subject:      pkix.Name{CommonName: d.Name}, // for people: nothing takes it for an identity
		NotBefore:    now.Add(-Skew),
		NotAfter:     now.Add(a.settings.Lifetime),
		URIs:         []*url.URL{id},
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},

		BasicConstraintsValid: true,
	}
	if template.NotAfter.After(ca.Leaf.NotAfter) {
		template.NotAfter = ca.Leaf.NotAfter
	}
	der, err = x509.CreateCertificate(rand.Reader, template, ca.Leaf, key, ca.PrivateKey)
	if err != nil {
		return nil, nil, fmt.Errorf("the authority cannot sign: %w", err)
	}
	return der, &issued{Serial: hex.EncodeToString(number), NotAfter: template.NotAfter.UTC().Truncate(time.Second), CA: serialOf(ca.Leaf)}, nil
}

var _ tunnel.Handler = (*Authority)(nil)
