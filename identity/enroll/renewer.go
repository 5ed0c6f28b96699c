package enroll

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/invitation"
	"culvert.dev/internal/statefile"
	"culvert.dev/internal/wallclock"
	"culvert.dev/tunnel"
)

const (
	// lookAgain is how often a Renewer looks at the clock: a timer stands still while the
	// machine is suspended, and does not follow a clock that is set.
	lookAgain = 30 * time.Second

	firstRetry = 5 * time.Second // after a failure, twice as much after each further one
	lastRetry  = 5 * time.Minute
)

// A Renewer renews the certificate of the device of a folder, at half of its life. Others
// follow the files. Several processes may have a Renewer of one folder: one of them renews.
// Its exported fields are set before its first use. It is safe for concurrent use.
type Renewer struct {
	Dir    string
	Dialer tunnel.Dialer // connects to the gateway
	Log    *slog.Logger  // nil discards

	now func() time.Time // for tests; nil means time.Now

	mu     sync.Mutex // guards status
	status RenewalStatus
}

func (r *Renewer) clock() time.Time {
	if r.now != nil {
		return r.now()
	}
	return time.Now()
}

// A RenewalStatus says how the certificate of a device is.
type RenewalStatus struct {
	Dir     string    `json:"dir"`
	Device  string    `json:"device"`
	ID      string    `json:"id"`
	Gateway string    `json:"gateway"`
	Expires time.Time `json:"expires,omitzero"`
	Renew   time.Time `json:"renew,omitzero"` // when the next one is asked for

	Problem string    `json:"problem,omitempty"` // why there is no other one, though it is time
	Since   time.Time `json:"since,omitzero"`    // of Problem
}

// Status says how the certificate is.
func (r *Renewer) Status() RenewalStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Dir = r.Dir
	return s
}

func (r *Renewer) log() *slog.Logger {
	if r.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return r.Log
}

// renewAt is when a certificate is renewed: at half of its life, and a little earlier or later
// by its serial number, so that devices that have joined together do not renew together.
func renewAt(c *x509.Certificate) time.Time {
	life := c.NotAfter.Sub(c.NotBefore)
	spread := time.Duration(0)
	if b := c.SerialNumber.Bytes(); len(b) > 0 {
		spread = life / 20 * time.Duration(b[len(b)-1]) / 256
	}
	return c.NotBefore.Add(life/2 + spread)
}

// Run renews the certificate until ctx is done, and returns its error.
func (r *Renewer) Run(ctx context.Context) error {
	retry, wait := time.Duration(0), time.Duration(0)
	for {
		if err := wallclock.Wait(ctx, r.clock, wait); err != nil {
			return err
		}
		due, err := r.once(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		r.note(err)
		switch {
		case err == nil:
			retry, wait = 0, max(min(due.Round(0).Sub(r.clock()), lookAgain), 0)
			continue
		case errors.Is(err, errTaken):
			retry = lastRetry
		}
		if ahead, ok := errors.AsType[*aheadError](err); ok {
			retry, wait = 0, ahead.wait
			continue
		}
		retry = min(max(2*retry, firstRetry), lastRetry)
		wait = retry
	}
}

// note notes how an attempt has ended, and logs a change of that.
func (r *Renewer) note(err error) {
	r.mu.Lock()
	was := r.status.Problem
	r.status.Problem = ""
	if err != nil {
		r.status.Problem = err.Error()
		if was == "" {
			r.status.Since = time.Now()
		}
	} else {
		r.status.Since = time.Time{}
	}
	s := r.status
	r.mu.Unlock()
	switch {
	case s.Problem == was:
	case err == nil:
		r.log().Info("the certificate of this device is renewed again", "device", s.Device, "expires", s.Expires)
	case !s.Expires.IsZero() && r.clock().After(s.Expires):
		r.log().Error("the certificate of this device has expired and can't be renewed; trying again", "device", s.Device, "expires", s.Expires, "error", s.Problem)
	default:
		r.log().Warn("the certificate of this device can't be renewed; trying again", "device", s.Device, "expires", s.Expires, "error", s.Problem)
	}
}

// once renews the certificate if it is time, and returns when it is next.
func (r *Renewer) once(ctx context.Context) (due time.Time, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = tunnel.Caught(v)
		}
	}()
	_, leaf, err := r.look()
	if err != nil {
		return time.Time{}, err
	}
	if due = renewAt(leaf); r.clock().Before(due) {
		return due, nil
	}
	lock, err := statefile.Lock(filepath.Join(r.Dir, membershipFile), "identity of this device")
	if errors.Is(err, statefile.ErrHeld) { // another process renews it
		return r.clock().Add(firstRetry), nil
	}
	if err != nil {
		return time.Time{}, err
	}
	defer lock.Close()
	m, leaf, err := r.look() // another process may have been here
	if err != nil {
		return time.Time{}, err
	}
	if due = renewAt(leaf); r.clock().Before(due) {
		return due, nil
	}
	if now := r.clock(); now.After(leaf.NotAfter) {
		return time.Time{}, fmt.Errorf("it has expired at %s, and a certificate is renewed by the one before: join again with a new token, or see whether the clock is right", leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if err := r.renew(ctx, m); err != nil {
		return time.Time{}, err
	}
	if _, leaf, err = r.look(); err != nil {
		return time.Time{}, err
	}
	r.log().Info("renewed the certificate of this device", "device", m.Name, "expires", leaf.NotAfter)
	if due = renewAt(leaf); !r.clock().Before(due) {
		return time.Time{}, &aheadError{due: due, wait: leaf.NotAfter.Sub(leaf.NotBefore) / 6}
	}
	return due, nil
}

// An aheadError is why a certificate that is new should be renewed at once. It would be so for
// ever, and the gateway signs a few certificates for each device, so the next one has to wait.
type aheadError struct {
	due  time.Time
	wait time.Duration
}

func (e *aheadError) Error() string {
	return fmt.Sprintf("the certificate is new, and was to be renewed again by %s: the clock of this device is ahead of the gateway's; set it", e.due.UTC().Format(time.RFC3339))
}

// look reads the files, and notes what they have.
func (r *Renewer) look() (*Membership, *x509.Certificate, error) {
	m, err := Load(r.Dir)
	if err != nil {
		return nil, nil, err
	}
	cert, _, err := read(r.Dir, m)
	if err != nil {
		return nil, nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status.Device, r.status.ID, r.status.Gateway = m.Name, m.ID, m.Gateway
	r.status.Expires, r.status.Renew = cert.Leaf.NotAfter, renewAt(cert.Leaf)
	return m, cert.Leaf, nil
}

// renew asks for the next certificate and puts it into the folder.
func (r *Renewer) renew(ctx context.Context, m *Membership) error {
	cert, b, err := read(r.Dir, m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, invitation.Timeout)
	defer cancel()
	cfg := &tls.Config{Certificates: []tls.Certificate{*cert}}
	v := identity.Verifier{
		Trust: []*identity.Trust{identity.NewTrust(b.TrustDomain, b.Roots...)},
		Want:  identity.Expectation{Usage: x509.ExtKeyUsageServerAuth, IDs: []string{m.GatewayID}},
	}
	v.Client(cfg)
	c, _, err := invitation.Dial(ctx, r.Dialer, m.Transport, m.Gateway, cfg, Host)
	if err != nil {
		return err
	}
	defer c.Close()
	got, err := ask(ctx, c, m.Gateway, &request{Name: m.Name})
	if err != nil {
		return err
	}
	if got.Name != m.Name || got.ID != m.ID || got.Domain != m.TrustDomain {
		return fmt.Errorf("the gateway at %s has sent the certificate of %q, and this device is %q", m.Gateway, clip(got.ID), m.ID)
	}
	return got.store(r.Dir)
}
