package enroll

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"culvert.dev/internal/invitation"
	"culvert.dev/internal/statefile"
)

// A state is what is kept on disk.
type state struct {
	Version     int       `json:"version"`
	Devices     []device  `json:"devices"`
	Invitations []invited `json:"invitations"`
	Lists       []list    `json:"revocationLists,omitempty"`
	Revoked     []issued  `json:"revoked,omitempty"` // that the list of the CA in force has
}

// stateVersion is that of the file.
const stateVersion = 1

// A device is one that has joined.
type device struct {
	Name         string    `json:"name"`
	ID           string    `json:"id"`
	Joined       time.Time `json:"joined"`
	Renewed      time.Time `json:"renewed,omitzero"`
	Certificates []issued  `json:"certificates"` // that have not expired
}

// An issued is a certificate of a device.
type issued struct {
	Serial   string    `json:"serial"` // hex
	NotAfter time.Time `json:"notAfter"`
	CA       string    `json:"ca"` // the serial number of the certificate that it was signed by, hex
}

// An invited is a token that somebody has. Who reads it can't join by it.
type invited struct {
	invitation.Record
	Name string `json:"name"` // of the device; one that ends with * is the beginning
	ID   string `json:"id"`   // one that ends with * gets the name there
	Uses int    `json:"uses"` // that are left
}

// A list is the revocation list of one CA.
type list struct {
	CA    string    `json:"ca"` // as in issued
	DER   []byte    `json:"der"`
	Until time.Time `json:"until"` // when the last certificate on it expires
}

// Close unlocks the file of the state.
func (a *Authority) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.close()
}

func (a *Authority) close() {
	if a.file != nil {
		a.file.Close()
		a.file = nil
	}
}

// load reads the state. It is called with a.mu held.
func (a *Authority) load(folder string) error {
	f, data, err := invitation.Open(folder, "devices.json", "state of devices")
	if err != nil {
		return fmt.Errorf("enrollment.state: %w", err)
	}
	a.file = f
	if data == nil {
		return nil
	}
	var got state
	if err := json.Unmarshal(data, &got); err != nil || got.Version != stateVersion {
		return fmt.Errorf("enrollment.state: %s is damaged, or of another version: put a copy from before in its place", f.Path)
	}
	for i := range got.Lists {
		if _, err := x509.ParseRevocationList(got.Lists[i].DER); err != nil {
			return fmt.Errorf("enrollment.state: a revocation list in %s is damaged: put a copy from before in its place", f.Path)
		}
	}
	a.state = got
	return nil
}

// save puts next on disk, and then in force. It is called with a.mu held.
func (a *Authority) save(next state) error {
	if a.file == nil {
		return errors.New("there is no state to keep devices in")
	}
	next.Version = stateVersion
	err := a.file.Save(&next)
	if err == nil {
		a.state = next
	}
	return err
}

// publish adds what was revoked to the trust. It is called with a.mu held.
func (a *Authority) publish() {
	if a.settings.Trust == "" {
		return
	}
	var all []*x509.RevocationList
	for i := range a.state.Lists {
		l, err := x509.ParseRevocationList(a.state.Lists[i].DER)
		if err == nil { // load has parsed it
			all = append(all, l)
		}
	}
	a.Store.Trust(a.settings.Trust).Revoke(all...)
}

// Devices returns those that have joined, by name.
func (a *Authority) Devices() []Device {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]Device, 0, len(a.state.Devices))
	for i := range a.state.Devices {
		d := &a.state.Devices[i]
		one := Device{Name: d.Name, ID: d.ID, Joined: d.Joined, Renewed: d.Renewed}
		for _, c := range d.Certificates {
			if c.NotAfter.After(one.Expires) {
				one.Expires = c.NotAfter
			}
		}
		one.Expired = !a.now().Before(one.Expires)
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Remove forgets a device and revokes its certificates: its tunnels end, and it gets no other
// certificate.
func (a *Authority) Remove(name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at := slices.IndexFunc(a.state.Devices, func(d device) bool { return d.Name == name })
	if at < 0 {
		return fmt.Errorf("no device %q has joined", clip(name))
	}
	if err := a.usable(); err != nil {
		return err
	}
	now, next := a.now(), a.state
	next.Revoked = append(unexpired(next.Revoked, now), unexpired(next.Devices[at].Certificates, now)...)
	next.Devices = slices.Delete(slices.Clone(next.Devices), at, at+1)
	if err := a.list(&next); err != nil {
		return err
	}
	if err := a.save(next); err != nil {
		return err
	}
	a.publish()
	a.log().Info("device removed", "device", name)
	return nil
}

// listLife is how long a revocation list is valid: others may follow it as a file, and what
// is on it expires before.
const listLife = 10 * 365 * 24 * time.Hour

// list signs the revocation list of the CA in force. Those of CAs before it stay until all on
// them has expired.
func (a *Authority) list(next *state) error {
	now, ca := a.now(), a.settings.CA
	template := &x509.RevocationList{Number: big.NewInt(now.UnixNano()), ThisUpdate: now.Add(-Skew), NextUpdate: now.Add(listLife)}
	one := list{CA: serialOf(ca.Leaf)}
	for _, c := range next.Revoked {
		if c.CA != one.CA {
			continue
		}
		serial, ok := new(big.Int).SetString(c.Serial, 16)
		if !ok {
			continue
		}
		template.RevokedCertificateEntries = append(template.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: serial, RevocationTime: now})
		if c.NotAfter.After(one.Until) {
			one.Until = c.NotAfter
		}
	}
	signer, ok := ca.PrivateKey.(crypto.Signer)
	if !ok {
		return fmt.Errorf("a key of the type %T cannot sign", ca.PrivateKey)
	}
	der, err := x509.CreateRevocationList(rand.Reader, template, ca.Leaf, signer)
	if err != nil {
		return fmt.Errorf("the authority cannot sign a revocation list: %w", err)
	}
	one.DER = der
	next.Lists = append(slices.DeleteFunc(slices.Clone(next.Lists), func(l list) bool { return l.CA == one.CA || now.After(l.Until) }), one)
	all := make([]byte, 0, len(der))
	for _, l := range next.Lists {
		all = append(all, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: l.DER})...)
	}
	return statefile.Replace(filepath.Join(a.settings.State, ListFile), func(w io.Writer) error {
		_, err := w.Write(all)
		return err
	})
}

// ListFile is the file in the folder of the state with the revocation lists, in PEM, for other
// gateways to follow. It is there once a device was removed.
const ListFile = "devices.crl"
